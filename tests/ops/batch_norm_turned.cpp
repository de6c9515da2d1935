#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/detail/turned_batches.hpp>

#include <ops/double_backward_cases.hpp>
#include <ops/epilogue_cases.hpp>
#include <ops/grid.hpp>
#include <ops/micro_batches.hpp>
#include <support/sanitized.hpp>

// Batches with channels outermost, whose samples and positions a pass takes for one another.
namespace {

using view_of_floats = syncnorm::tensor_view<float const>;

/// x, y and an epilogue as a pass takes them.
struct taken {
  std::array<view_of_floats, 1> x;
  std::array<syncnorm::tensor_view<float>, 1> y;
  std::array<syncnorm::batch_norm_epilogue<float>, 1> epilogue;

  taken(view_of_floats const& of_x, syncnorm::tensor_view<float> const& of_y,
        syncnorm::batch_norm_epilogue<float> const& given = {})
      : x{of_x}, y{of_y}, epilogue{given} {
    syncnorm::detail::turned_batches<view_of_floats, syncnorm::tensor_view<float>, syncnorm::batch_norm_epilogue<float>>
        turned;
    std::span<view_of_floats const> xs{x};
    std::span<syncnorm::tensor_view<float> const> ys{y};
    std::span<syncnorm::batch_norm_epilogue<float> const> epilogues{epilogue};
    turned.turn(xs, xs, ys, epilogues);
    x[0] = xs[0], y[0] = ys[0], epilogue[0] = epilogues[0];
  }
};

template <class T>
std::array<std::int64_t, 6> form(syncnorm::tensor_view<T> const& of) {
  return {of.samples, of.channels, of.spatial, of.stride_n, of.stride_c, of.stride_s};
}

template <class T>
syncnorm::tensor_view<T> by_channels(std::vector<T>& of, std::int64_t n, std::int64_t c, std::int64_t s,
                                     bool samples_inside) {
  if (samples_inside) return {of.data(), n, c, s, 1, n * s, n};
  return {of.data(), n, c, s, s, n * s, 1};
}

} // namespace

TEST_CASE("a pass takes samples for positions where that makes longer rows, and no others") {
  using form_of = std::array<std::int64_t, 6>;
  std::vector<float> memory(4 * 3 * 6);
  auto const matrix = by_channels(memory, 4, 3, 1, true);
  taken const by_columns{matrix, matrix};
  CHECK(form(by_columns.x[0]) == form_of{1, 3, 4, 4, 4, 1});
  CHECK(form(by_columns.y[0]) == form(by_columns.x[0]));
  for (bool const inside : {true, false}) {
    auto const x = by_channels(memory, 4, 3, 6, inside);
    CHECK(form(taken{x, x}.x[0])[2] == 24);
    CHECK(form(taken{x, x}.x[0])[5] == 1);
    // Whose samples do not follow each other, in y or in the mask, remain several.
    auto apart = x;
    (inside ? apart.stride_s : apart.stride_n) += 1;
    CHECK(form(taken{x, apart}.x[0])[0] == (inside ? 6 : 4));
    std::vector<std::uint8_t> mask(4 * 8, 1);
    syncnorm::mask_view const with_gaps{mask.data(), 4, 6, 8, 1};
    taken const masked{x, x, {.mask = with_gaps}};
    CHECK(form(masked.x[0])[0] == (inside ? 6 : 4));
    CHECK(masked.epilogue[0].mask.samples == masked.x[0].samples);
    CHECK(masked.epilogue[0].mask.stride_n == (inside ? 1 : 8));
    auto const dense = syncnorm::mask_of(mask.data(), 4, 6);
    taken const joined{x, x, {.residual = x, .mask = dense}};
    CHECK(form(joined.epilogue[0].residual) == form(joined.x[0]));
    // A mask by samples does not follow where the tensor is by positions.
    CHECK(joined.x[0].samples == (inside ? 6 : 1));
    CHECK(joined.epilogue[0].mask.spatial == joined.x[0].spatial);
  }
  // Every other column of a matrix.
  syncnorm::tensor_view<float> const columns{memory.data(), 4, 3, 1, 6, 2, 1};
  CHECK(form(taken{columns, columns}.x[0]) == form_of{1, 3, 4, 1, 2, 6});
  // One of several contiguous channels.
  syncnorm::tensor_view<float> const lone{memory.data(), 4, 1, 6, 18, 1, 3}, of_matrix{memory.data(), 4, 1, 1, 3, 1, 1};
  CHECK(form(taken{lone, lone}.x[0]) == form_of{4, 1, 6, 18, 0, 3});
  CHECK(form(taken{of_matrix, of_matrix}.y[0]) == form_of{1, 1, 4, 1, 0, 3});
  for (auto const& usual : {syncnorm::nchw(memory.data(), 4, 3, 6), syncnorm::nhwc(memory.data(), 4, 3, 6),
                            syncnorm::tbc(memory.data(), 6, 4, 3), syncnorm::nc(memory.data(), 4, 3),
                            syncnorm::nchw(memory.data(), 4, 1, 6), syncnorm::nchw(memory.data(), 1, 3, 6)})
    CHECK(form(taken{usual, usual}.x[0]) == form(usual));
}

TEST_CASE_TEMPLATE("batches with channels outermost agree with the oracle", T, float AND_UNSANITIZED(double)) {
  std::size_t turn = 0;
  for (auto const order : test::layouts_by_channels)
    for (int const ranks : {1, 3})
      for (auto const spread : test::partitions)
        for (std::int64_t const spatial : {1, 7, 40}) {
          test::grid_case const cell{ranks, 5, 4, spatial, spread, order};
          test::case_data<T> const data{cell};
          auto const& choice = test::epilogue_choices[turn++ % test::epilogue_choices.size()];
          test::epilogue_case<T> const with_epilogue{cell, choice};
          syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
            for (auto const& failure : test::run_case(data, comm)) FAIL_CHECK(failure);
            if (with_epilogue.oracle.count == 1) return;
            for (auto const& failure : test::run_epilogue_case(with_epilogue, comm)) FAIL_CHECK(failure);
          });
        }
}

TEST_CASE("one of several contiguous channels is normalized as by itself") {
  for (std::int64_t const spatial : {1, 25}) {
    constexpr std::int64_t samples = 7, stride = 5;
    std::vector<float> wide(static_cast<std::size_t>(samples * spatial * stride), -77), y = wide, dx = wide;
    std::vector<float> x(static_cast<std::size_t>(samples * spatial)), of_x(x), dx_of_x(x);
    for (std::size_t i = 0; i < x.size(); ++i) wide[i * stride + 2] = x[i] = static_cast<float>(test::noise(1, i));
    auto const slice = [&](std::vector<float>& of) -> syncnorm::tensor_view<float> {
      return {of.data() + 2, samples, 1, spatial, spatial * stride, 1, stride};
    };
    auto const dense = [&](auto& of) { return syncnorm::nchw(of.data(), samples, 1, spatial); };
    syncnorm::batch_norm<float> layer{{}, 1}, other{{}, 1};
    layer.forward(slice(wide), slice(y));
    layer.backward(slice(wide), slice(wide), slice(dx));
    other.forward(dense(x), dense(of_x));
    other.backward(dense(x), dense(x), dense(dx_of_x));
    for (std::size_t i = 0; i < y.size(); ++i) {
      bool const of_channel = i % stride == 2;
      CHECK(y[i] ==
            (of_channel ? doctest::Approx(of_x[i / stride]).epsilon(test::tolerance<float>) : doctest::Approx(-77)));
      CHECK(dx[i] ==
            (of_channel ? doctest::Approx(dx_of_x[i / stride]).epsilon(test::tolerance<float>) : doctest::Approx(-77)));
    }
  }
}

TEST_CASE("micro-batches and double backward passes of batches with channels outermost agree with the oracle") {
  for (auto const order : test::layouts_by_channels) {
    for (auto const& shares : test::micro_batch_shares)
      syncnorm::run_ranks(static_cast<int>(shares.size()), [&](syncnorm::thread_communicator const& comm) {
        for (auto const& failure : test::check_micro_batches<double>(comm, shares, order, 3)) FAIL_CHECK(failure);
      });
    for (bool const with_epilogue : {false, true}) {
      test::second_order_case problem{{2, 3}};
      if (with_epilogue) problem.with_epilogue(0.25, true, true, false);
      syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
        for (auto const& failure :
             test::check_double_backward(comm, problem, syncnorm::exchange_policy::automatic, order))
          FAIL_CHECK(failure);
      });
    }
  }
}

TEST_CASE("a batch with channels outermost is normalized in place, and x is back") {
  for (bool const inside : {true, false})
    for (std::int64_t const spatial : {1, 6}) {
      constexpr std::int64_t samples = 8, channels = 3;
      std::vector<float> x(static_cast<std::size_t>(samples * channels * spatial)), y(x.size()), dx(x.size()),
          dx_in_place(x.size());
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(test::noise(1, i));
      auto over = x, dy = x;
      auto const view = [&](auto& of) { return by_channels(of, samples, channels, spatial, inside); };
      syncnorm::batch_norm<float> apart{{}, channels}, layer{{}, channels};
      apart.forward(view(x), view(y));
      apart.backward(view(x), view(dy), view(dx));
      layer.forward_in_place(view(over));
      CHECK(over == y);
      layer.backward_in_place(view(over), view(dy), view(dx_in_place));
      for (std::size_t i = 0; i < x.size(); ++i) {
        CHECK(over[i] == doctest::Approx(x[i]).epsilon(test::tolerance<float>));
        CHECK(dx_in_place[i] == doctest::Approx(dx[i]).epsilon(test::tolerance<float>));
      }
    }
}

TEST_CASE("a bad mask of a batch with channels outermost is named as it is") {
  std::vector<float> memory(4 * 3 * 6);
  std::vector<std::uint8_t> mask(24, 1);
  auto const x = by_channels(memory, 4, 3, 6, true);
  syncnorm::batch_norm<float> layer{{}, 3};
  try {
    layer.forward(x, x, {.mask = syncnorm::mask_of(mask.data(), 6, 4)});
    FAIL_CHECK("nothing thrown");
  } catch (syncnorm::invalid_argument_error const& error) {
    std::string const message = error.what();
    CHECK_MESSAGE(message.find("the mask is [6, 4], expected [4, 6]") != std::string::npos, message);
  }
}
