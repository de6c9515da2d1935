#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/detail/moment_rows.hpp>
#include <syncnorm/host/detail/product_rows.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/row_pipeline.hpp>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/part_after_part.hpp>

#include <host/tensors.hpp>

using namespace syncnorm;

namespace {

/// Rows of one piece and of several, with and without tails; one group of pieces and many; with a last piece of one double.
constexpr test::extents pipeline_shapes[] = {{3, 5, 9},    {9, 7, 333},   {1, 4, 1040},  {5, 5, 2100},
                                             {2, 3, 4200}, {130, 3, 260}, {2, 3, 64'513}};

template <class T>
struct pipeline_results {
  std::vector<double> mean, m2, sum_dy, sum_dy_xmu;
  std::vector<T> y, dx;

  explicit pipeline_results(std::int64_t channels)
      : mean(static_cast<std::size_t>(channels), -1), m2(mean), sum_dy(mean), sum_dy_xmu(mean) {}
};

template <class T>
void check_same(pipeline_results<T> const& got, pipeline_results<T> const& whole) {
  CHECK(test::same_bits(got.mean, whole.mean));
  CHECK(test::same_bits(got.m2, whole.m2));
  CHECK(test::same_bits(got.sum_dy, whole.sum_dy));
  CHECK(test::same_bits(got.sum_dy_xmu, whole.sum_dy_xmu));
  CHECK(test::same_bits(got.y, whole.y));
  CHECK(test::same_bits(got.dx, whole.dx));
}

/// Passes over the same tensors, one after the other or as a pipeline. m2 stands in for inv_std.
template <class T>
struct pipeline_case {
  tensor_view<T const> x, dy;
  std::vector<T> gamma, beta;
  std::int64_t count;
  host::detail::processor on{std::int64_t{1} << 40, true};
  host::detail::map_fetches fetched = host::detail::map_fetches::nothing;

  using A = accumulate_t<T>;

  void separate(pipeline_results<T>& r, tensor_view<T> y, tensor_view<T> dx) const {
    host::serial_executor const serial;
    host::local_moments(serial, x, r.mean, r.m2);
    host::normalize(serial, x, y, r.mean, r.m2, affine_parameters<T>{gamma, beta});
    host::backward_reduce(serial, dy, x, r.mean, r.sum_dy, r.sum_dy_xmu);
    host::backward_elemt(serial, dy, x, dx, r.mean, r.m2, std::span<T const>{gamma}, r.sum_dy, r.sum_dy_xmu, count);
  }

  template <class E>
  void forward(E const& exec, std::int64_t block, pipeline_results<T>& r, tensor_view<T> y, host::stores how) const {
    host::detail::groups const parts{x};
    std::vector<int> finished(r.mean.size());
    using host::detail::channels_of;
    host::detail::reduce_and_map_rows<T>(
        exec, host::detail::channel_blocks{x.channels, block}, x, parts, {1, fetched},
        [&](std::int64_t first, std::int64_t length) {
          return host::detail::moment_rows<T>{x.channel_range(first, length), parts};
        },
        {r.mean.data(), r.m2.data()},
        [&](std::int64_t first, std::int64_t length) {
          for (std::int64_t c = first; c < first + length; ++c) ++finished[static_cast<std::size_t>(c)];
        },
        host::detail::map_of_channels<T>(host::detail::linear_op<1>{}, {x}, {y}, nullptr, how,
                                         [&](std::int64_t first, std::int64_t length) {
                                           return host::detail::normalize_terms<A>{
                                               channels_of(std::span<double const>{r.mean}, first, length),
                                               channels_of(std::span<double const>{r.m2}, first, length),
                                               {channels_of(std::span<T const>{gamma}, first, length), 1},
                                               {channels_of(std::span<T const>{beta}, first, length), 0}};
                                         }),
        on);
    CHECK(finished == std::vector<int>(finished.size(), 1));
  }

  template <class E>
  void backward(E const& exec, std::int64_t block, pipeline_results<T>& r, tensor_view<T> dx, host::stores how) const {
    using host::detail::channels_of;
    host::detail::reduce_and_map_rows<T>(
        exec, host::detail::channel_blocks{x.channels, block}, x, host::detail::groups{x},
        {2, host::detail::map_fetches::next_sums},
        [&](std::int64_t first, std::int64_t length) {
          using sums_of = host::detail::terms_of_lanes<host::detail::gradient_terms<A>>;
          return host::detail::product_rows<T, sums_of>{
              sums_of{{r.mean}, first}, {dy.channel_range(first, length), x.channel_range(first, length)}, nullptr};
        },
        {r.sum_dy.data(), r.sum_dy_xmu.data()}, [](std::int64_t, std::int64_t) {},
        host::detail::map_of_channels<T>(host::detail::linear_op<2>{}, {dy, x}, {dx}, nullptr, how,
                                         [&](std::int64_t first, std::int64_t length) {
                                           return host::detail::backward_elemt_terms<A>{
                                               channels_of(std::span<double const>{r.mean}, first, length),
                                               channels_of(std::span<double const>{r.m2}, first, length),
                                               {channels_of(std::span<T const>{gamma}, first, length), 1},
                                               channels_of(std::span<double const>{r.sum_dy}, first, length),
                                               channels_of(std::span<double const>{r.sum_dy_xmu}, first, length),
                                               count};
                                         }),
        on);
  }
};

} // namespace

TEST_CASE_TEMPLATE("summing a block while the one before is mapped gives the bits of separate passes", T, float,
                   bfloat16 AND_UNSANITIZED(double)) {
  for (auto const& shape : pipeline_shapes) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    if (s > 5000 && sizeof(T) != 8) continue;
    CAPTURE(test::name_of(shape));
    auto const values = test::deviates<T>(n, c, s, 1), gradients = test::deviates<T>(n, c, s, 2);
    for (auto const order : {test::arrangement::nchw, test::arrangement::padded_rows}) {
      if (test::sanitized && order != test::arrangement::nchw && n * c * s > 30'000) continue;
      CAPTURE(test::name_of(order));
      test::tensor<T> x{order, n, c, s, values, 1}, dy{order, n, c, s, gradients}, y{order, n, c, s, 3},
          dx{order, n, c, s};
      host::detail::channel_blocks const narrow{c, 1};
      if (!host::detail::suits_row_pipeline<host::detail::moment_rows<T>>(
              narrow, std::array<tensor_view<T const>, 2>{x.view(), dy.view()}, std::array{y.view()})) {
        CHECK((s == 9 && order == test::arrangement::nchw)); // where positions are taken for channels
        continue;
      }
      auto const ch = static_cast<std::size_t>(c);
      pipeline_case<T> passes{x.view(), dy.view(), std::vector<T>(ch, T(1.5)), std::vector<T>(ch, T(-0.25)), n * s};
      pipeline_results<T> whole{c};
      passes.separate(whole, y.view(), dx.view());
      whole.y = y.values();
      whole.dx = dx.values();

      auto const check = [&](auto const& exec, std::int64_t block, host::stores how) {
        CAPTURE(block);
        pipeline_results<T> got{c};
        test::tensor<T> y_got{order, n, c, s, 2}, dx_got{order, n, c, s, 1}, over = dy;
        passes.forward(exec, block, got, y_got.view(), how);
        passes.backward(exec, block, got, dx_got.view(), how);
        got.y = y_got.values();
        got.dx = dx_got.values();
        check_same(got, whole);
        CHECK(y_got.intact());
        CHECK(dx_got.intact());

        pipeline_case<T> in_place = passes;
        in_place.dy = over.view();
        in_place.backward(exec, block, got, over.view(), how);
        got.dx = over.values();
        over = x;
        in_place.x = over.view();
        in_place.forward(exec, block, got, over.view(), how);
        got.y = over.values();
        check_same(got, whole);
      };
      check(host::serial_executor{}, 1, host::stores::streaming);
      check(host::serial_executor{}, 2, host::stores::cached);
      check(test::shuffling_executor{2}, 1, host::stores::cached);
      check(test::shuffling_executor{1}, 2, host::stores::streaming);
      // Where of the next block as much as half, a third, or nothing fits beside one.
      auto const bytes = static_cast<std::int64_t>(sizeof(T)) * n * s;
      for (std::int64_t const room : {bytes + bytes / 2, bytes + bytes / 3, bytes}) {
        passes.on.second_level = room * 8 / 5;
        passes.fetched = host::detail::map_fetches::next_piece;
        check(host::serial_executor{}, 1, host::stores::streaming);
        // Threads that share each block, as far as it has samples and groups, and one that takes the shares of all.
        check(test::shuffling_executor{2}, 1, host::stores::streaming);
        check(test::lone_executor{4}, 1, host::stores::cached);
      }
      for (std::int64_t const room : {16 * bytes, bytes}) {
        passes.on = {room, false};
        check(host::serial_executor{}, 2, host::stores::streaming);
        check(test::shuffling_executor{2}, 1, host::stores::cached);
      }
    }
  }
}

namespace {

/// `[N, C, S]` that begins with a line of the cache, and a line or more on both sides of it that nobody may write.
template <class T>
class lined_tensor {
public:
  /// Begins `past` elements after a line of the cache does.
  explicit lined_tensor(test::extents const& of, std::int64_t past = 0)
      : of_{of}, memory_(static_cast<std::size_t>(of.n * of.c * of.s + 5 * line), T(untouched)) {
    auto const past_line = reinterpret_cast<std::uintptr_t>(memory_.data()) % detail::cache_line / sizeof(T);
    begin_ = 2 * line - static_cast<std::int64_t>(past_line) + past;
  }

  [[nodiscard]] tensor_view<T> view() { return nchw<T>(memory_.data() + begin_, of_.n, of_.c, of_.s); }
  [[nodiscard]] std::vector<T> values() const {
    return {memory_.begin() + begin_, memory_.begin() + begin_ + of_.n * of_.c * of_.s};
  }
  [[nodiscard]] bool intact() const {
    auto const as_before = [](T v) { return v == T(untouched); };
    return std::all_of(memory_.begin(), memory_.begin() + begin_, as_before) &&
           std::all_of(memory_.begin() + begin_ + of_.n * of_.c * of_.s, memory_.end(), as_before);
  }

private:
  static constexpr std::int64_t line = host::detail::line_elements<T>;
  static constexpr float untouched = -77;
  test::extents of_;
  std::vector<T> memory_;
  std::int64_t begin_ = 0;
};

template <class T>
using normalizing_map = host::detail::elementwise_map<T, host::detail::linear_op<1>>;

} // namespace

TEST_CASE_TEMPLATE(
    "vectors of a block mapped between those that are summed of the next give the bits of separate passes", T, float,
    double, bfloat16) {
  // Rows of one line more than fours of any vectors, of fours, of several pieces, of a last piece of a line, in one group and many; groups that
  // are read side by side, two of them with one left over, two with a shorter one after them, and of pieces that do not match. Then such whose
  // lines begin in the midst of a piece, or outputs that begin in the midst of a line.
  struct {
    test::extents shape;
    std::int64_t past;
  } const cases[] = {{{9, 7, 336}, 0},   {{5, 4, 576}, 0},   {{3, 5, 2112}, 0},  {{130, 3, 272}, 0}, {{2, 3, 4160}, 0},
                     {{24, 3, 1040}, 0}, {{11, 3, 2112}, 0}, {{7, 3, 4160}, 0},  {{9, 7, 333}, 0},   {{5, 4, 583}, 0},
                     {{3, 5, 2119}, 1},  {{130, 3, 257}, 0}, {{24, 3, 1041}, 7}, {{11, 3, 2117}, 0}, {{7, 3, 4161}, 0},
                     {{2, 3, 4160}, 3},  {{24, 3, 1040}, 8}};
  for (auto const& each : cases) {
    auto const& shape = each.shape;
    std::int64_t const past = each.past;
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    CAPTURE(test::name_of(shape));
    CAPTURE(past);
    auto const ch = static_cast<std::size_t>(c);
    test::tensor<T> x{test::arrangement::nchw, n, c, s, test::deviates<T>(n, c, s, 1), 1},
        dy{test::arrangement::nchw, n, c, s, test::deviates<T>(n, c, s, 2)};
    // A channel whose first piece is far off the others' mean, so that its pivot moves.
    for (std::int64_t i = 0; i < s; ++i) x.view()(0, 1, i) = T(static_cast<accumulate_t<T>>(x.view()(0, 1, i)) + 5000);
    lined_tensor<T> y{shape, past}, dx{shape, past};
    pipeline_case<T> passes{x.view(), dy.view(), std::vector<T>(ch, T(1.5)), std::vector<T>(ch, T(-0.25)), n * s};
    pipeline_results<T> whole{c};
    passes.separate(whole, y.view(), dx.view());
    whole.y = y.values();
    whole.dx = dx.values();

    auto const bytes = static_cast<std::int64_t>(sizeof(T)) * n * s;
    // One that does not foresee takes turns where pieces are whole lines alone.
    for (bool const foresees : {false, true}) {
      CAPTURE(foresees);
      auto const check = [&](auto const& exec, std::int64_t block, std::int64_t second_level) {
        CAPTURE(block);
        CAPTURE(second_level);
        passes.on = {second_level, foresees, true};
        pipeline_results<T> got{c};
        lined_tensor<T> y_got{shape, past}, dx_got{shape, past};
        passes.forward(exec, block, got, y_got.view(), host::stores::streaming);
        passes.backward(exec, block, got, dx_got.view(), host::stores::streaming);
        got.y = y_got.values();
        got.dx = dx_got.values();
        check_same(got, whole);
        CHECK(y_got.intact());
        CHECK(dx_got.intact());
      };
      check(host::serial_executor{}, 1, 100 * bytes);
      check(host::serial_executor{}, 2, 100 * bytes); // the last block of three channels, the others of two
      check(test::shuffling_executor{2}, 1, 100 * bytes);
      check(host::serial_executor{}, 1, bytes); // no room for one block
      // Room for one forward, or for two that two threads share, as far as blocks have groups.
      check(host::serial_executor{}, 1, 2 * bytes);
      check(test::shuffling_executor{2}, 1, 2 * bytes);
      check(test::lone_executor{2}, 1, 2 * bytes);
    }

    // A part of the channels, and then the others.
    for (std::int64_t const cut : {std::int64_t{1}, c - 1}) {
      CAPTURE(cut);
      host::serial_executor const exec;
      host::detail::processor const on{200 * bytes, cut == 1, true};
      pipeline_results<T> got{c};
      lined_tensor<T> y_got{shape, past}, dx_got{shape, past};
      auto const how = host::stores::streaming;
      auto const part = [&](auto const& of) { return of.channel_range(0, cut); };
      auto const others = [&](auto const& of) { return of.channel_range(cut, c - cut); };
      auto const of_part = [&](auto& of) { return std::span{of}.first(static_cast<std::size_t>(cut)); };
      auto const of_others = [&](auto& of) { return std::span{of}.subspan(static_cast<std::size_t>(cut)); };
      std::vector<T> const &gamma = passes.gamma, &beta = passes.beta;
      host::local_moments(exec, part(passes.x), of_part(got.mean), of_part(got.m2));
      host::normalize_and_local_moments(exec, part(passes.x), part(y_got.view()), of_part(got.mean), of_part(got.m2),
                                        affine_parameters<T>{of_part(gamma), of_part(beta)}, how, others(passes.x),
                                        of_others(got.mean), of_others(got.m2), on);
      host::normalize(exec, others(passes.x), others(y_got.view()), of_others(got.mean), of_others(got.m2),
                      affine_parameters<T>{of_others(gamma), of_others(beta)}, how);
      host::backward_reduce(exec, part(passes.dy), part(passes.x), of_part(got.mean), of_part(got.sum_dy),
                            of_part(got.sum_dy_xmu));
      host::backward_elemt_and_reduce(exec, part(passes.dy), part(passes.x), part(dx_got.view()), of_part(got.mean),
                                      of_part(got.m2), of_part(gamma), of_part(got.sum_dy), of_part(got.sum_dy_xmu),
                                      n * s, how, others(passes.dy), others(passes.x), of_others(got.mean),
                                      of_others(got.sum_dy), of_others(got.sum_dy_xmu), on);
      host::backward_elemt(exec, others(passes.dy), others(passes.x), others(dx_got.view()), of_others(got.mean),
                           of_others(got.m2), of_others(gamma), of_others(got.sum_dy), of_others(got.sum_dy_xmu), n * s,
                           how);
      got.y = y_got.values();
      got.dx = dx_got.values();
      check_same(got, whole);
      CHECK(y_got.intact());
      CHECK(dx_got.intact());
    }
  }
}

TEST_CASE_TEMPLATE("a piece mapped four vectors at a time has the bits of its row", T, float, double, bfloat16) {
  test::extents const shape{3, 4, 64 * 3 + 32};
  std::int64_t const n = shape.n, c = shape.c, s = shape.s;
  test::tensor<T> x{test::arrangement::nchw, n, c, s, test::deviates<T>(n, c, s, 1), 1};
  std::vector<double> const mean{0.5, -1, 2, 0}, inv_std{1, 2, 0.5, 3};
  std::vector<T> const gamma(4, T(1.5)), beta(4, T(-0.25));
  host::detail::normalize_terms<accumulate_t<T>> const terms{
      mean, inv_std, {std::span<T const>{gamma}, 1}, {std::span<T const>{beta}, 1}};
  std::vector<accumulate_t<T>> table(static_cast<std::size_t>(normalizing_map<T>::table_size(x.view())));
  auto const map_to = [&](tensor_view<T> y, host::stores how, std::type_identity_t<tensor_view<T const>> from) {
    return normalizing_map<T>{{}, terms, {from}, {y}, nullptr, how, table.data()};
  };
  lined_tensor<T> y{shape}, whole{shape};
  auto const streaming = host::stores::streaming;
  host::detail::row_cut const cut{s, host::detail::row_cut::longest<T>};
  auto const can_interleave = [&](tensor_view<T> to, host::stores how, std::type_identity_t<tensor_view<T const>> from,
                                  host::detail::row_cut const& of, bool lines = true) {
    return host::detail::can_interleave<T>(std::array{from}, std::array{to}, nullptr, how, of, lines);
  };
  auto const map = map_to(y.view(), streaming, x.view());
  REQUIRE(can_interleave(y.view(), streaming, x.view(), cut) == host::detail::can_stream<T>);
  if (!host::detail::can_stream<T>) return;
  constexpr std::int64_t four = 4 * host::detail::native_lanes<accumulate_t<T>>;
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < c; ++j) {
      auto between = map.interleaved(j);
      between.move_to(i, 0, s);
      for (std::int64_t at = 0; at + four <= s; at += four) between(at);
      between.finish(s);
    }
  host::detail::stream_fence();
  map_to(whole.view(), host::stores::cached, x.view())({0, c, 0, n, 0, s});
  CHECK(test::same_bits(y.values(), whole.values()));
  CHECK(y.intact());

  // Where an output is not streamed it is not, nor, unless that is wanted, where lines have parts of two pieces.
  for (bool const lines : {false, true}) {
    CHECK(!can_interleave(y.view(), host::stores::cached, x.view(), cut, lines));
    CHECK(!can_interleave(y.view(), streaming, y.view(), cut, lines));
  }
  auto elsewhere = y.view();
  ++elsewhere.data;
  CHECK(!can_interleave(elsewhere, streaming, x.view(), cut));
  CHECK(can_interleave(elsewhere, streaming, x.view(), cut, false));
  auto apart = y.view();
  apart.stride_n += 1;
  CHECK(!can_interleave(apart, streaming, x.view(), cut));
  CHECK(can_interleave(apart, streaming, x.view(), cut, false));
  auto shorter = y.view();
  shorter.spatial = s - 1;
  tensor_view<T const> from = x.view();
  from.spatial = s - 1;
  CHECK(!can_interleave(shorter, streaming, from, {s - 1, host::detail::row_cut::longest<T>}));
  CHECK(can_interleave(shorter, streaming, from, {s - 1, host::detail::row_cut::longest<T>}, false));
  // Not where the last piece of a row is short, nor outputs of which lines begin elsewhere.
  CHECK(!can_interleave(shorter, streaming, from, {s - 1, 64}, false));
  CHECK(!host::detail::can_interleave<T>(std::array<tensor_view<T const>, 1>{x.view()}, std::array{y.view(), elsewhere},
                                         nullptr, streaming, cut, false));
}

TEST_CASE("blocks that do not fit the cache of a core twice are shared by as few threads as have room for them") {
  constexpr std::int64_t kb = 1024;
  host::detail::processor on{2048 * kb, true};
  bool interleaves = false;
  auto const shares = [&](test::extents const& of, std::int64_t inputs, std::int64_t threads) {
    tensor_view<float const> const x{nullptr, of.n, of.c, of.s, of.c * of.s, of.s, 1};
    return host::detail::shares_of_block(x, of.c, inputs, threads, interleaves, on);
  };
  for (std::int64_t const threads : {1, 2, 8})
    CHECK(shares({32, 1, 3136}, 1, threads) == 1); // 392 KB, twice in 1280 KB
  CHECK(shares({32, 1, 3136}, 2, 1) == 1);
  CHECK(shares({32, 1, 3136}, 2, 2) == 2);
  CHECK(shares({32, 1, 3136}, 2, 3) == 1); // of 8 groups of pieces three threads have no equal shares
  CHECK(shares({32, 1, 3136}, 2, 8) == 2);
  CHECK(shares({32, 1, 12'544}, 2, 2) == 2); // 3136 KB, once in the caches of two
  CHECK(shares({32, 1, 12'544}, 2, 8) == 4); // of 28 groups
  CHECK(shares({32, 1, 50'176}, 2, 2) == 1); // 12.25 MB, in no case
  CHECK(shares({2, 1, 200'704}, 1, 4) == 2); // of two samples
  CHECK(shares({3000, 1, 100}, 1, 2) == 1);  // short rows, which are no pipeline's
  on = {2048 * kb, false};
  CHECK(shares({32, 1, 3136}, 2, 2) == 1); // where a block is mapped by itself
  interleaves = true;
  CHECK(shares({32, 1, 3136}, 2, 2) == 2);
  CHECK(shares({32, 1, 3136}, 1, 2) == 1);
  CHECK(shares({32, 1, 12'544}, 2, 8) == 4);
  on = {1280 * kb, true, true};
  CHECK(shares({32, 1, 3136}, 1, 2) == 2); // twice in more than half of it
  CHECK(shares({32, 1, 784}, 1, 2) == 1);
}

TEST_CASE_TEMPLATE("a part mapped while the part after it is summed has the bits of separate passes", T, float,
                   bfloat16 AND_UNSANITIZED(double)) {
  for (auto const& shape : {test::extents{3, 7, 333}, {2, 5, 2100}, {4, 7, 9}, {0, 7, 300}, {2, 7, 64'513}}) {
    std::int64_t const n = shape.n, c = shape.c, s = shape.s;
    if (s > 5000 && sizeof(T) != 8) continue;
    CAPTURE(test::name_of(shape));
    for (auto const order : {test::arrangement::nchw, test::arrangement::padded_rows, test::arrangement::nhwc}) {
      CAPTURE(test::name_of(order));
      test::tensor<T> x{order, n, c, s, test::deviates<T>(n, c, s, 1), 1},
          dy{order, n, c, s, test::deviates<T>(n, c, s, 2)};
      test::tensor<T> y{order, n, c, s, 3}, dx{order, n, c, s}, y_got{order, n, c, s, 2}, dx_got{order, n, c, s, 1};
      auto const ch = static_cast<std::size_t>(c);
      pipeline_case<T> const passes{x.view(), dy.view(), std::vector<T>(ch, T(1.5)), std::vector<T>(ch, T(-0.25)),
                                    n * s};
      pipeline_results<T> whole{c};
      passes.separate(whole, y.view(), dx.view());
      whole.y = y.values();
      whole.dx = dx.values();

      // A part that is followed by a narrower one, a wider one and an equal one.
      std::int64_t const cuts[] = {0, 2, 3, 5, c};
      auto const check = [&](auto const& exec, host::stores how, host::detail::processor const& on) {
        CAPTURE(on.foresees);
        CAPTURE(on.interleaves_rows);
        pipeline_results<T> got{c};
        auto const sums = [&](std::vector<double>& values, int part) {
          return host::detail::channels_of(std::span{values}, cuts[part], cuts[part + 1] - cuts[part]);
        };
        auto const of = [&](std::vector<double> const& values, int part) {
          return host::detail::channels_of(std::span{values}, cuts[part], cuts[part + 1] - cuts[part]);
        };
        auto const view = [&](auto whole_view, int part) {
          return whole_view.channel_range(cuts[part], cuts[part + 1] - cuts[part]);
        };
        auto const gamma = [&](int part) {
          return host::detail::channels_of(std::span{passes.gamma}, cuts[part], cuts[part + 1] - cuts[part]);
        };
        auto const beta = [&](int part) {
          return host::detail::channels_of(std::span{passes.beta}, cuts[part], cuts[part + 1] - cuts[part]);
        };
        host::local_moments(exec, view(passes.x, 0), sums(got.mean, 0), sums(got.m2, 0));
        for (int part = 0; part < 3; ++part)
          host::normalize_and_local_moments(exec, view(passes.x, part), view(y_got.view(), part), of(got.mean, part),
                                            of(got.m2, part), affine_parameters<T>{gamma(part), beta(part)}, how,
                                            view(passes.x, part + 1), sums(got.mean, part + 1), sums(got.m2, part + 1),
                                            on);
        host::normalize(exec, view(passes.x, 3), view(y_got.view(), 3), of(got.mean, 3), of(got.m2, 3),
                        affine_parameters<T>{gamma(3), beta(3)}, how);
        host::backward_reduce(exec, view(passes.dy, 0), view(passes.x, 0), of(got.mean, 0), sums(got.sum_dy, 0),
                              sums(got.sum_dy_xmu, 0));
        for (int part = 0; part < 3; ++part)
          host::backward_elemt_and_reduce(exec, view(passes.dy, part), view(passes.x, part), view(dx_got.view(), part),
                                          of(got.mean, part), of(got.m2, part), gamma(part), of(got.sum_dy, part),
                                          of(got.sum_dy_xmu, part), passes.count, how, view(passes.dy, part + 1),
                                          view(passes.x, part + 1), of(got.mean, part + 1), sums(got.sum_dy, part + 1),
                                          sums(got.sum_dy_xmu, part + 1), on);
        host::backward_elemt(exec, view(passes.dy, 3), view(passes.x, 3), view(dx_got.view(), 3), of(got.mean, 3),
                             of(got.m2, 3), gamma(3), of(got.sum_dy, 3), of(got.sum_dy_xmu, 3), passes.count, how);
        got.y = y_got.values();
        got.dx = dx_got.values();
        check_same(got, whole);
        CHECK(y_got.intact());
        CHECK(dx_got.intact());
      };
      constexpr std::int64_t cache = std::int64_t{1} << 20;
      using host::detail::processor;
      for (auto const& on : {processor{cache, false}, processor{cache, true}, processor{cache, false, true},
                             processor{cache, true, true}}) {
        check(host::serial_executor{}, host::stores::streaming, on);
        check(host::serial_executor{}, host::stores::cached, on);
        check(test::shuffling_executor{2}, host::stores::streaming, on);
      }
    }
  }
}
