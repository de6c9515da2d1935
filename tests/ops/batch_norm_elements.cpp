#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/half.hpp>

#include <ops/grid.hpp>
#include <support/sanitized.hpp>

using syncnorm::bfloat16;
using syncnorm::float16;

namespace {

/// A type of a user's own: the storage of a bfloat16 with a format, so that it is converted by vectors.
struct own_half {
  std::uint16_t bits = 0;

  own_half() = default;
  explicit own_half(float value) : bits{bfloat16{value}.bits()} {}
  explicit operator float() const { return bfloat16::from_bits(bits); }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
  explicit operator long double() const { return static_cast<long double>(static_cast<float>(*this)); }
};

/// Elements and parameters of a case.
template <class T, class P>
struct types {
  using element = T;
  using parameter = P;
};

/// A few cases that between them have all layouts, spreads and kernels; the grid has the rest.
template <class Run>
void for_each_small_case(int ranks, Run const& run) {
  for (auto const order : test::layouts)
    for (auto const spread : test::partitions)
      for (std::int64_t const channels : {3, 140}) {
        std::int64_t const spatial = order == test::layout::nc ? 1 : channels == 3 ? 37 : 9;
        run(test::grid_case{ranks, channels, 6, spatial, spread, order});
      }
}

} // namespace

template <>
struct syncnorm::element_traits<own_half> {
  using accumulate_type = float;
  static constexpr std::string_view name = "own_half";
  static constexpr auto format = element_format::bfloat16;
};

TEST_CASE_TEMPLATE("16-bit elements agree with the oracle on the same elements, whatever the parameters are", Types,
                   types<float16, float>, types<bfloat16, bfloat16>,
                   types<test::if_sanitized<bfloat16, own_half>, double> AND_UNSANITIZED(types<float16, float16>,
                                                                                         types<bfloat16, float>,
                                                                                         types<float, float16>)) {
  using T = typename Types::element;
  using P = typename Types::parameter;
  for (int const ranks : {1, 2, 3}) {
    if (test::sanitized && ranks != 3) continue;
    for_each_small_case(ranks, [&](test::grid_case const& cell) {
      test::case_data<T, P> const data{cell};
      syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
        for (auto const& failure : test::run_case(data, comm)) FAIL_CHECK(failure);
      });
    });
  }
}

TEST_CASE("inference of 8-bit integers is rounded once, and stays within them") {
  syncnorm::host::serial_executor const exec;
  for (auto const order : {test::layout::nchw, test::layout::nhwc, test::layout::strided})
    for (bool const activates : {false, true})
      for (std::int64_t const spatial : {1, 7, 50, 300}) {
        std::int64_t const samples = 3, channels = 21;
        CAPTURE(static_cast<int>(order));
        CAPTURE(spatial);
        test::owned_tensor<std::int8_t> x{order, samples, channels, spatial},
            residual{order, samples, channels, spatial}, y{order, samples, channels, spatial};
        std::vector<float> gamma, beta, mean, var;
        for (std::int64_t c = 0; c < channels; ++c) {
          gamma.push_back(c % 5 == 4 ? -300.0F : 40.0F + static_cast<float>(c));
          beta.push_back(static_cast<float>(c) - 10);
          mean.push_back(static_cast<float>(3 * c) - 30.25F);
          var.push_back(900.0F + static_cast<float>(100 * c));
        }
        auto const each = [&](auto const& f) {
          for (std::int64_t n = 0; n < samples; ++n)
            for (std::int64_t c = 0; c < channels; ++c)
              for (std::int64_t s = 0; s < spatial; ++s) f(n, c, s);
        };
        std::uint64_t at = 0;
        each([&](auto n, auto c, auto s) {
          x.view(n, c, s) = static_cast<std::int8_t>(127.5 * test::noise(1, at));
          residual.view(n, c, s) = static_cast<std::int8_t>(127.5 * test::noise(2, at++));
        });
        syncnorm::batch_norm_epilogue<std::int8_t> epilogue;
        if (activates) epilogue = {.activation = syncnorm::activation::relu(), .residual = residual.view};
        syncnorm::batch_norm_saved saved;
        syncnorm::batch_norm_inference<std::int8_t, float>(exec, x.view, y.view, {gamma, beta}, mean, var, 1e-3, saved,
                                                           syncnorm::running_variance::unbiased, epilogue);
        std::int64_t wrong = 0, ends = 0;
        each([&](auto n, auto c, auto s) {
          auto const i = static_cast<std::size_t>(c);
          long double v =
              gamma[i] * (x.view(n, c, s) - static_cast<long double>(mean[i])) / std::sqrt(var[i] + 1e-3L) + beta[i];
          if (activates) v = std::max(v + residual.view(n, c, s), 0.0L);
          long double const within = std::clamp(v, -128.0L, 127.0L);
          ends += within != v ? 1 : 0;
          // What float computes is off by less than a thousandth, which may tell a tie.
          if (std::abs(y.view(n, c, s) - within) > 0.5L + 1e-3L) ++wrong;
        });
        CHECK(wrong == 0);
        CHECK(ends > 0);
      }
}

TEST_CASE("a number becomes the nearest 8-bit integer, by a tie the even one") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  struct rounding {
    float number;
    int integer;
  };
  for (auto const& of : {rounding{0.5F, 0},
                         {1.5F, 2},
                         {-0.5F, 0},
                         {-2.5F, -2},
                         {2.500001F, 3},
                         {126.5F, 126},
                         {127.4F, 127},
                         {1e30F, 127},
                         {infinity, 127},
                         {-127.5F, -128},
                         {-129.0F, -128},
                         {-infinity, -128},
                         {std::numeric_limits<float>::quiet_NaN(), -128}}) {
    CAPTURE(of.number);
    CHECK(int{syncnorm::from_accumulate<std::int8_t>(of.number)} == of.integer);
  }
  for (int integer = -128; integer < 128; ++integer) {
    auto const element = static_cast<std::int8_t>(integer);
    CHECK(syncnorm::from_accumulate<std::int8_t>(syncnorm::to_accumulate(element)) == element);
  }
}

TEST_CASE("statistics of float16 neither overflow nor lose counts") {
  // Each square is beyond float16, and so is the count of 70000 elements.
  constexpr std::int64_t samples = 7, channels = 2, spatial = 5000;
  std::vector<float16> x(samples * channels * spatial), y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = float16{60000 + 32 * static_cast<int>(i % 3)};
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    std::vector<float16> own(x.size());
    auto const view = syncnorm::nchw(own.data(), samples, channels, spatial);
    auto const saved = syncnorm::batch_norm_forward(syncnorm::host::serial_executor{}, comm,
                                                    syncnorm::nchw(x.data(), samples, channels, spatial), view);
    test::batch_norm_oracle const oracle{x, samples, channels, spatial, 1e-5};
    CHECK(saved.count == 2 * samples * spatial);
    for (std::size_t c = 0; c < channels; ++c) {
      CHECK(saved.mean[c] == doctest::Approx(static_cast<double>(oracle.mean[c])).epsilon(1e-7));
      CHECK(saved.inv_std[c] == doctest::Approx(static_cast<double>(oracle.inv_std[c])).epsilon(1e-5));
    }
  });
}

TEST_CASE("a rank with an empty batch of halves sends what the others expect") {
  // The message has the size that every rank expects: a group that checks sizes would throw, and the values would be off.
  test::case_data<float16> const data{{4, 5, 9, 11, test::partition::with_empty_ranks, test::layout::nchw}};
  syncnorm::run_ranks(4, [&](syncnorm::thread_communicator const& comm) {
    if (comm.rank() % 2 == 0) CHECK(data.cell.samples_of(comm.rank()) == 0);
    for (auto const& failure : test::run_case(data, comm)) FAIL_CHECK(failure);
  });
}

TEST_CASE("ranks of different element types are told so, an empty one, too") {
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    std::vector<float16> halves(8);
    std::string what;
    try {
      if (comm.rank() == 0) {
        syncnorm::batch_norm<float16, syncnorm::thread_communicator> layer{comm, 2};
        layer.forward(syncnorm::nchw(halves.data(), 2, 2, 2), syncnorm::nchw(halves.data(), 2, 2, 2));
      } else {
        syncnorm::batch_norm<float, syncnorm::thread_communicator> layer{comm, 2};
        layer.forward(syncnorm::nchw<float>(nullptr, 0, 2, 2), syncnorm::nchw<float>(nullptr, 0, 2, 2));
      }
    } catch (syncnorm::mismatch_error const& error) {
      what = error.what();
    }
    CHECK(what.find("rank 0 has float16, rank 1 has float") != std::string::npos);
  });
}

TEST_CASE("halves beyond the cache are streamed and exchanged in parts") {
  for (auto const order : {test::layout::nchw, test::layout::nhwc}) {
    if (test::sanitized && order != test::layout::nchw) continue;
    test::case_data<bfloat16> const data{{2, test::sanitized ? 5 : 40, 8, 8 * 1024, test::partition::uneven, order}};
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      for (auto const& failure : test::run_case(data, comm)) FAIL_CHECK(failure);
    });
  }
}
