#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>

#include <doctest/doctest.h>

#include <host/tensors.hpp>
#include <syncnorm/cuda/detail/prepare.hpp>
#include <syncnorm/cuda/workspace.hpp>

namespace {

using namespace syncnorm;
namespace gpu = syncnorm::cuda::detail;
using enum gpu::epilogue_kind;
using gpu::axis;

constexpr cuda::device_limits limits{132, 227 * 1024};

// Tensors that nobody accesses.
float const* const far = reinterpret_cast<float const*>(std::uintptr_t{1} << 44);

constexpr test::extents all[] = {
    {64, 256, 56 * 56}, {8192, 4096, 1},    {32, 512, 28 * 28}, {1, 1, 1},          {3, 5, 7},
    {1, 3, 1000000},    {4000000, 3, 1},    {2, 100000, 4},     {70000, 64, 1000},  {1, 1, std::int64_t{5} << 30},
    {0, 7, 5},          {7, 5, 0},          {1, 1 << 30, 1},    {9, 17, 33 * 1000}, {1300, 1 << 16, 14 * 14},
    {256, 2048, 49},    {5000, 24, 3},      {4000, 8, 121},     {100, 1 << 20, 9},  {3000, 200, 169},
    {4000, 39601, 784}, {4000, 30000, 784},
};

template <class Op>
void check_cut(Op const& op, gpu::geometry const& cut, std::int64_t parts) {
  constexpr std::int64_t length = gpu::pack_length<typename Op::element_type>;
  auto const items = cut.items();
  CHECK(cut.pieces >= 1);
  CHECK(cut.pieces * cut.per_piece >= items);
  CHECK((cut.pieces - 1) * cut.per_piece <= std::max<std::int64_t>(0, items - 1));
  std::int64_t const wide = gpu::axis_of(op.lead()) == axis::positions ? 1 : cut.lanes * length;
  CHECK(cut.groups * wide >= op.lead().channels);
  CHECK(std::int64_t{cut.groups} * cut.pieces < std::int64_t{1} << 31);
  if (parts == 0 || cut.pieces == 1) return;
  auto const left = std::int64_t{cut.groups} * cut.pieces * parts * (wide == 1 ? 1 : 8 * length);
  auto const channels = cut.channels_of_layer<axis::channels>();
  CHECK(cut.groups <= channels);
  CHECK(gpu::workspace_layout::ticket_bytes(channels) + 8 * static_cast<std::size_t>(left) <=
        cuda::workspace_bytes(channels, limits));
}

} // namespace

TEST_CASE("Cuts cover every element of any extents, and the workspace has room for what they leave") {
  for (auto const& e : all)
    for (bool const last : {false, true}) {
      INFO(test::name_of(e));
      auto const x = last ? nhwc(far, e.n, e.c, e.s) : nchw(far, e.n, e.c, e.s);
      gpu::moments_op<float> const moments{x};
      check_cut(moments, gpu::cut_for_reduction(moments, 1, 256, limits), moments.parts);
      gpu::double_backward_sums_op<float, false> const sums{{}, {}, x, x, x};
      check_cut(sums, gpu::cut_for_reduction(sums, 1, 128, limits), sums.parts);
      gpu::normalize_op<float, none> map;
      map.x = x;
      check_cut(map, gpu::cut_for_map(map, 1, 256, limits), 0);

      auto const* const halves = reinterpret_cast<bfloat16 const*>(far);
      gpu::moments_op<bfloat16> const of_halves{last ? nhwc(halves, e.n, e.c, e.s) : nchw(halves, e.n, e.c, e.s)};
      cuda::workspace const work{const_cast<float*>(far), 0};
      auto const made = gpu::make_reduction(of_halves, {}, {}, work, limits, 256);
      check_cut(made.op, made.cut, made.op.parts);
    }
}

TEST_CASE("The last piece of tensors beyond 2^31 elements ends with their last element") {
  for (auto const& x : {nchw(far, 70000, 64, 1000), nchw(far + 1, 70001, 64, 999), nhwc(far, 70000, 64, 1000),
                        nhwc(far, 1, 4, std::int64_t{3} << 30)}) {
    gpu::moments_op<float> const op{x};
    auto const cut = gpu::cut_for_reduction(op, 1, 256, limits);
    bool const rows = gpu::axis_of(x) == axis::positions;
    std::int64_t count = 0, farthest = 0;
    bool inside = true;
    auto const visit = [&](auto walk) {
      for (; walk.inside(); walk.advance()) {
        auto const at = walk.here();
        if (at.part.last <= at.part.first) continue;
        count += at.part.last - at.part.first;
        auto const first = gpu::address(x, at) + at.part.first;
        inside = inside && first >= x.data && at.part.last <= 4;
        farthest = std::max<std::int64_t>(farthest, gpu::address(x, at) - x.data + at.part.last);
      }
    };
    auto const last = gpu::part_of_group::of_block(cut, cut.blocks() - 1);
    for (int thread = 0; thread < 256; ++thread)
      if (rows)
        visit(gpu::walk<axis::positions, float>{cut, x, last, thread, 256});
      else
        visit(gpu::walk<axis::channels, float>{cut, x, last, thread, 256});
    CHECK(inside);
    CHECK(farthest == x.size());
    if (!rows) CHECK(count == (last.end - last.begin) * std::min<std::int64_t>(x.channels, cut.lanes * 4));
  }
}

TEST_CASE("Threads that put channels together find them in different banks of shared memory") {
  auto const check = [](auto const& cells, int length) {
    // 16 threads access 128 bytes at a time.
    std::set<std::ptrdiff_t> banks;
    for (int channel = 0; channel < 16; ++channel)
      banks.insert((&cells.of[1][channel % length][channel / length] - &cells.of[0][0][0]) % 16);
    CHECK(banks.size() == 16);
  };
  check(*std::make_unique<gpu::pack_accumulator<gpu::moments_op<bfloat16>, 256>::storage>(), 8);
  check(*std::make_unique<gpu::pack_accumulator<gpu::moments_op<float>, 256>::storage>(), 4);
  check(*std::make_unique<gpu::pack_accumulator<gpu::moments_op<double>, 256>::storage>(), 2);
}

TEST_CASE("Along channels, tensors become ones of one sample where their samples follow each other") {
  int flat = 0, kept = 0;
  auto const check = [&](tensor_view<float const> const& x, tensor_view<float> const& y, mask_view const& mask,
                         bool expected) {
    gpu::normalize_op<float, linear> op;
    op.x = x, op.y = y, op.mask = mask;
    gpu::flatten(op);
    bool const is_flat = op.x.samples == 1 && op.x.spatial == x.samples * x.spatial && op.x.stride_n == 0;
    CHECK(is_flat == expected);
    if (!is_flat) {
      CHECK((op.x.samples == x.samples && op.y.stride_n == y.stride_n && op.x.spatial == x.spatial));
      ++kept;
      return;
    }
    ++flat;
    bool same = op.residual.data == nullptr;
    for (std::int64_t n = 0; n < x.samples; ++n)
      for (std::int64_t s = 0; s < x.spatial; ++s) {
        gpu::spot const before{n, s, 2, {}}, after{0, n * x.spatial + s, 2, {}};
        same = same && gpu::address(x, before) == gpu::address(op.x, after) &&
               gpu::address(y, before) == gpu::address(op.y, after);
      }
    CHECK(same);
    CHECK(gpu::axis_of(op.x) == axis::channels);
  };
  auto* const to = const_cast<float*>(far) + (1 << 20);
  auto const* const bytes = reinterpret_cast<std::uint8_t const*>(far + (1 << 21));
  for (std::int64_t const n : {1, 3})
    for (std::int64_t const s : {1, 5}) {
      auto const x = nhwc(far, n, 8, s);
      auto const y = nhwc(to, n, 8, s);
      check(x, y, {}, true);
      check(x, y, mask_of(bytes, n, s), false);
      check(nhwc(far, 0, 8, s), nhwc(to, 0, 8, s), {}, false);
      auto sparse_rows = y, sparse_samples = y, backward = y;
      sparse_rows.stride_s = 12, sparse_rows.stride_n = 12 * s;
      check(x, sparse_rows, {}, true);
      sparse_samples.stride_n += 4;
      check(x, sparse_samples, {}, n == 1 || s == 1);
      backward.stride_s = -8, backward.stride_n = -8 * s;
      check(x, backward, {}, true);
      check(nchw(far, n, 8, 5), nchw(to, n, 8, 5), {}, false);
      check(nhwc(far, n, 1, 1), nhwc(to, n, 1, 1), {}, false); // which is one along positions, too
    }
  CHECK((flat > 8 && kept > 8));
}

TEST_CASE("Packs are whole throughout where each of them is, along channels those of one sample without a mask") {
  int whole = 0, broken = 0;
  auto const check = [&](tensor_view<float const> const& x, tensor_view<float> const& y, mask_view const& mask) {
    gpu::normalize_op<float, linear> op;
    op.x = x, op.y = y, op.mask = mask;
    bool const rows = gpu::axis_of(x) == axis::positions, is_one = rows || (x.samples == 1 && mask.data == nullptr);
    std::int64_t const along = rows ? x.spatial : x.channels, across = rows ? x.channels : x.spatial;
    auto const is_whole = [&]<axis Axis>(gpu::spot const& at) {
      return gpu::is_one_access<Axis>(op.x, at) && gpu::is_one_access<Axis>(op.y, at) &&
             gpu::is_one_access<Axis, float>(op.mask, at);
    };
    bool each = along % 4 == 0;
    for (std::int64_t n = 0; n < x.samples; ++n)
      for (std::int64_t i = 0; i < across; ++i)
        for (std::int64_t first = 0; first < along; first += 4)
          each = each && (rows ? is_whole.template operator()<axis::positions>({n, first, i, {0, 4}})
                               : is_whole.template operator()<axis::channels>({n, i, first, {0, 4}}));
    CHECK(gpu::is_whole_throughout(op) == (each && is_one));
    CHECK(gpu::cut_for_map(op, 1, 256, limits).whole == (each && is_one));
    ++(each && is_one ? whole : broken);
  };
  auto* const to = const_cast<float*>(far) + (1 << 20);
  auto const* const bytes = reinterpret_cast<std::uint8_t const*>(far + (1 << 21));
  for (std::int64_t const n : {1, 2})
    for (std::int64_t const c : {1, 3, 4, 8})
      for (std::int64_t const s : {1, 3, 4, 8})
        for (bool const last : {false, true}) {
          auto const x = last ? nhwc(far, n, c, s) : nchw(far, n, c, s);
          auto const y = last ? nhwc(to, n, c, s) : nchw(to, n, c, s);
          check(x, y, {});
          check(x, last ? nchw(to, n, c, s) : nhwc(to, n, c, s), {});
          for (std::int64_t const apart : {1, 4}) {
            auto shifted = y, sparse_samples = y, sparse_rows = y;
            shifted.data += apart, sparse_samples.stride_n += apart;
            (last ? sparse_rows.stride_s : sparse_rows.stride_c) += apart;
            for (auto const& each : {shifted, sparse_samples, sparse_rows}) check(x, each, {});
            check(x, y, mask_of(bytes + apart, n, s));
          }
        }
  CHECK((whole > 50 && broken > 50));
}

TEST_CASE(
    "Packs are aligned throughout where each is one access of 16 bytes of its tensor, but for the first and the last") {
  int aligned = 0, unaligned = 0;
  auto const check = [&](tensor_view<float const> const& x, tensor_view<float> const& y) {
    gpu::normalize_op<float, none> op;
    op.x = x, op.y = y;
    auto const cut = gpu::cut_for_map(op, 1, 256, limits);
    bool each = true;
    auto const of_tensor = [&](auto const& t, gpu::spot const& at) {
      auto const* const first = gpu::address(t, at);
      auto const* const end =
          t.data + (t.samples - 1) * t.stride_n + (t.channels - 1) * t.stride_c + (t.spatial - 1) * t.stride_s + 1;
      return gpu::is_one_access<axis::positions>(t, at) && t.data <= first && first + 4 <= end;
    };
    for (std::uint32_t group = 0; group < cut.groups; ++group)
      for (int thread = 0; thread < cut.threads; ++thread)
        for (gpu::walk<axis::positions, float> items{cut, x, {group, 0, 1, 0, cut.items()}, thread, cut.threads};
             items.inside(); items.advance()) {
          auto const at = items.here();
          if (at.part.last <= at.part.first || (at.part.first == 0 && at.part.last == 4)) continue;
          // Of a whole launch none is there in part; of others the kernel asks whether the next is aligned.
          bool const as_planned = items.next(1, 1) != gpu::known::aligned || (of_tensor(x, at) && of_tensor(y, at));
          CHECK(as_planned);
          each = each && items.next(1, 1) == gpu::known::aligned;
        }
    ++(cut.aligned ? aligned : unaligned);
    if (cut.aligned && !cut.whole && x.samples * x.channels > 2) CHECK(!each); // the first or the last pack
  };
  auto* const to = const_cast<float*>(far) + (1 << 20);
  for (std::int64_t const n : {1, 2, 3})
    for (std::int64_t const c : {1, 3, 5})
      for (std::int64_t const s : {1, 3, 5, 7, 8, 49})
        for (std::int64_t const off : {0, 1, 3}) {
          auto const x = nchw(far + off, n, c, s);
          auto const y = nchw(to + off, n, c, s);
          if (gpu::axis_of(x) != axis::positions) continue;
          check(x, y);
          check(x, nchw(to + 4 + off, n, c, s));
          auto sparse = y;
          sparse.stride_c += 4, sparse.stride_n += 8;
          check(x, sparse);
          sparse.stride_n = 0; // broadcast
          check(x, sparse);
          sparse = y;
          sparse.stride_c = -sparse.stride_c;
          check(x, sparse);
        }
  CHECK((aligned > 50 && unaligned > 50));
}

TEST_CASE("Units are as long as all rows of all tensors begin and end at a multiple of") {
  auto const unit = [](std::int64_t n, std::int64_t c, std::int64_t s, std::int64_t x_off = 0, std::int64_t y_off = 0,
                       bool masked = false) {
    gpu::moments_op<float> sums;
    gpu::normalize_op<float, none> map;
    map.x = sums.x = nchw(far + x_off, n, c, s);
    map.y = nchw(const_cast<float*>(far) + (1 << 20) + y_off, n, c, s);
    if (masked) sums.mask = mask_of(reinterpret_cast<std::uint8_t const*>(far), n, s);
    auto cut = gpu::cut_for_fused(sums, 256, limits);
    gpu::take_units(cut, sums, map);
    if (cut.unit != 0) {
      CHECK(cut.items() * cut.unit == n * s * 4);
      CHECK(cut.per_piece * cut.unit % 16 == 0);
      CHECK(cut.step_outer * cut.inner + cut.step_inner == cut.threads);
    }
    return cut.unit;
  };
  CHECK(unit(32, 3, 784) == 16);
  CHECK(unit(32, 3, 6) == 4);
  CHECK(unit(32, 3, 49) == 4);
  CHECK(unit(1, 1, 49) == 4);
  CHECK(unit(32, 3, 784, 2) == 4);
  CHECK(unit(32, 3, 784, 0, 1) == 4);
  CHECK(unit(32, 3, 784, 0, 0, true) == 0);
  auto sparse = nchw(far, 5, 3, 8);
  CHECK(gpu::unit_of(sparse) == 16);
  sparse.stride_n += 2;
  CHECK(gpu::unit_of(sparse) == 4);
  auto const* const halves = reinterpret_cast<bfloat16 const*>(far);
  CHECK(gpu::unit_of(nchw(halves, 5, 3, 196)) == 8);
  CHECK(gpu::unit_of(nchw(halves, 5, 3, 98)) == 2);
  CHECK(gpu::unit_of(nchw(halves + 4, 5, 3, 196)) == 8);
  CHECK(gpu::unit_of(nchw(reinterpret_cast<double const*>(far), 5, 3, 49)) == 8);
  sparse.stride_n = std::int64_t{1} << 30;
  CHECK(gpu::unit_of(sparse) == 0);
  auto every_other = nchw(far, 5, 3, 8);
  every_other.stride_s = 2;
  CHECK(gpu::unit_of(every_other) == 0);
}

TEST_CASE("What is launched for rows of 16-bit elements takes them by units of 8 bytes where packs are not whole") {
  auto* const from = reinterpret_cast<bfloat16*>(const_cast<float*>(far));
  cuda::workspace const work{from, 0};
  auto const cut = [&](std::int64_t n, std::int64_t s, std::int64_t offset = 0, bool masked = false) {
    gpu::moments_op<bfloat16> op{nchw<bfloat16 const>(from + offset, n, 64, s)};
    if (masked) op.mask = mask_of(reinterpret_cast<std::uint8_t const*>(far), n, s);
    auto const made = gpu::make_reduction(op, {}, {}, work, limits, 256).cut;
    CHECK((made.unit == 0 || (made.items() * 8 == n * s * 2 && made.per_piece * 8 <= 64 * 1024)));
    CHECK((made.unit == 0 || made.pieces * made.per_piece >= made.items()));
    return made;
  };
  CHECK(cut(63, 196).unit == 8);
  CHECK(cut(63, 196).pieces == 1);
  CHECK(cut(5, 4).unit == 8);
  CHECK(cut(256, 784).unit == 0); // whole packs
  CHECK(cut(256, 49).unit == 0);
  CHECK(cut(256, 196, 1).unit == 0);
  CHECK((cut(256, 196, 4).unit == 8 && cut(256, 196, 4).pieces == 2)); // no columns, for which packs are not whole
  CHECK(cut(256, 196, 0, true).unit == 0);
  CHECK(cut(0, 196).unit == 0);
  CHECK(cut(200000, 196, 4).unit == 0); // of more pieces than the last block would put together
  gpu::moments_op<float> const of_float{nchw(far, 5, 64, 49)};
  CHECK(gpu::make_reduction(of_float, {}, {}, work, limits, 256).cut.unit == 0);
}

TEST_CASE("Rows can be columns where their samples are contiguous and packs are then whole") {
  int columns = 0, rows = 0;
  auto const check = [&](tensor_view<float const> const& x, tensor_view<float> const& y, mask_view const& mask,
                         bool expected) {
    gpu::normalize_op<float, linear> op;
    op.x = x, op.y = y, op.mask = mask;
    CHECK(gpu::columns_of(op) == (expected ? x.spatial : 1));
    ++(expected ? columns : rows);
    auto const made = gpu::make_map(op, limits, 256);
    bool const taken = expected && (x.spatial % 4 != 0 || x.samples >= 256);
    CHECK(made.cut.columns == (taken ? x.spatial : 1));
    if (!taken) return;
    CHECK((made.cut.whole && made.cut.channels_of_layer<axis::channels>() == x.channels));
    CHECK(gpu::axis_of(made.op.x) == axis::channels);
    bool same = made.op.residual.data == nullptr;
    for (std::int64_t n = 0; n < x.samples; ++n)
      for (std::int64_t c = 0; c < x.channels; ++c)
        for (std::int64_t s = 0; s < x.spatial; ++s) {
          gpu::spot const before{n, s, c, {}}, after{0, n, c * x.spatial + s, {}};
          same = same && gpu::address(x, before) == gpu::address(made.op.x, after) &&
                 gpu::address(y, before) == gpu::address(made.op.y, after) &&
                 made.cut.channel_of<axis::channels>(after.channel) == c;
        }
    CHECK(same);
  };
  auto* const to = const_cast<float*>(far) + (1 << 20);
  auto const* const bytes = reinterpret_cast<std::uint8_t const*>(far + (1 << 21));
  for (std::int64_t const n : {7, 8, 256})
    for (std::int64_t const c : {4, 6, 8})
      for (std::int64_t const s : {1, 3, 6, 8, 49}) {
        auto const x = nchw(far, n, c, s);
        auto const y = nchw(to, n, c, s);
        bool const can = n >= 8 && c * s % 4 == 0 && s != 1;
        check(x, y, {}, can);
        check(x, y, mask_of(bytes, n, s), false);
        check(nchw(far + 1, n, c, s), y, {}, false);
        check(x, nchw(to + 2, n, c, s), {}, false);
        if (s != 1) check(x, nhwc(to, n, c, s), {}, false);
        auto apart = y, sparse = y, broadcast = y;
        apart.stride_n += 4, sparse.stride_n += 2, broadcast.stride_n = 0;
        check(x, apart, {}, can);
        check(x, sparse, {}, can && sparse.stride_n % 4 == 0);
        if (s != 1) check(x, broadcast, {}, false);
        sparse = y, sparse.stride_c += 4, sparse.stride_n += 4 * c;
        if (s != 1) check(x, sparse, {}, false);
      }
  CHECK((columns > 20 && rows > 100));
  CHECK(gpu::columns_of(gpu::moments_op<float>{nchw(far, 8, std::int64_t{1} << 29, 3)}) == 1); // not narrow
  auto const mapped = [&](std::int64_t n, std::int64_t s) {
    gpu::normalize_op<float, none> op;
    op.x = nchw(far, n, 4, s), op.y = nchw(to, n, 4, s);
    return gpu::mapped_columns_of(op);
  };
  CHECK((mapped(256, 256) == 256 && mapped(256, 260) == 1 && mapped(255, 256) == 1 && mapped(8, 3001) == 3001));
  CHECK(mapped(256, 0) == 1);
}

TEST_CASE("Reductions take columns of whole channels, where threads have enough of them") {
  auto const lanes = [](std::int64_t columns, int threads = 256, std::int64_t groups = 1, std::int64_t wave = 264) {
    return gpu::lanes_of_channels<bfloat16>(columns, groups * columns * 8, threads, wave);
  };
  CHECK((lanes(49) == 49 && lanes(196) == 49 && lanes(9) == 9 && lanes(2) == 1));
  CHECK((lanes(225) == 225 && lanes(169) == 0 && lanes(49, 128) == 49 && lanes(49, 64) == 49 && lanes(257) == 0));
  CHECK((lanes(49, 256, 264) == 49 && lanes(49, 256, 265) == 98));
  CHECK((lanes(196, 256, 264) == 196 && lanes(49, 64, 1000) == 49 && lanes(3, 256, 100000) == 24));
  CHECK((lanes(81, 256, 1000) == 81 && lanes(25, 256, 1000) == 100));

  cuda::workspace const work{const_cast<float*>(far), 0};
  auto const columns = [&]<class T>(T, std::int64_t n, std::int64_t c, std::int64_t s) {
    gpu::moments_op<T> const op{nchw(reinterpret_cast<T const*>(far), n, c, s)};
    auto const cut = gpu::make_reduction(op, {}, {}, work, limits, 256).cut;
    CHECK((cut.columns == 1 || (cut.lanes * gpu::pack_length<T> % cut.columns == 0 && cut.whole)));
    return cut.columns;
  };
  CHECK((columns(bfloat16{}, 256, 2048, 49) == 49 && columns(float{}, 32, 512, 49) == 49));
  CHECK((columns(bfloat16{}, 32, 512, 49) == 1 && columns(bfloat16{}, 64, 512, 169) == 1));
  CHECK((columns(bfloat16{}, 256, 1024, 196) == 196 && columns(bfloat16{}, 64, 256, 196) == 1));

  for (int by = 1; by < 1024; ++by) {
    gpu::small_divisor const divisor{by};
    bool right = true;
    for (int i = 0; i < 1024; ++i) right = right && divisor.divide(i) == i / by;
    CHECK(right);
  }
}

TEST_CASE("Maps are as wide along channels as lines of the cache fill, and blocks have threads for") {
  auto const lanes = [](std::int64_t channels, int threads) {
    gpu::normalize_op<float, none> map;
    map.x = nhwc(far, 64, channels, 100);
    return gpu::cut_for_map(map, 1, threads, limits).lanes;
  };
  CHECK((lanes(12, 256) == 4 && lanes(30, 256) == 8 && lanes(144, 256) == 8));
  CHECK((lanes(192, 256) == 16 && lanes(256, 256) == 32 && lanes(1000, 256) == 32));
  CHECK((lanes(256, 128) == 32 && lanes(256, 64) == 16));
}

TEST_CASE("Packs of tensors whose extents or strides are not narrow are not whole") {
  auto const is_whole = [](std::int64_t n, std::int64_t spatial, std::int64_t stride_n) {
    auto x = nchw(far, n, 2, spatial);
    x.stride_n = stride_n;
    return gpu::cut_for_reduction(gpu::moments_op<float>{x}, 1, 256, limits).whole;
  };
  std::int64_t const narrow = std::int64_t{1} << 30;
  CHECK(is_whole(2, narrow - 4, narrow - 4));
  CHECK(is_whole(2, 64, -narrow));
  CHECK(!is_whole(1, narrow, 0));
  CHECK(!is_whole(narrow, 64, 128));
  CHECK(!is_whole(2, 64, narrow));
}

TEST_CASE("Channels stay on the chip where they fit, of clusters two blocks to a multiprocessor") {
  auto const fits = []<class T>(T, bool backward, std::int64_t n, std::int64_t c, std::int64_t s, int cluster_blocks) {
    cuda::device_limits of{132, 227 * 1024, cluster_blocks};
    auto const* const data = reinterpret_cast<T const*>(far);
    gpu::moments_op<T> moments;
    gpu::backward_sums_op<T, linear> sums; // whose residual is missing, and takes no room
    moments.x = sums.x = sums.dy = nchw(data, n, c, s);
    return backward ? gpu::fits_on_chip(sums, 256, 1024, of) : gpu::fits_on_chip(moments, 256, 1024, of);
  };
  CHECK(fits(float{}, false, 64, 256, 3136, 8));
  CHECK(!fits(float{}, true, 64, 256, 3136, 8));
  CHECK(fits(bfloat16{}, true, 64, 256, 3136, 8));
  CHECK(!fits(float{}, false, 64, 256, 3136, 1));
  CHECK(!fits(float{}, false, 256, 64, 12544, 8));
  for (int const blocks : {1, 8}) {
    CHECK(fits(float{}, false, 32, 512, 784, blocks));
    CHECK(fits(float{}, true, 32, 512, 784, blocks));
    CHECK(!fits(float{}, false, 0, 512, 784, blocks));
  }
  CHECK(!fits(bfloat16{}, false, 64, 512, 49, 8)); // two kernels by columns take less time
  CHECK(fits(bfloat16{}, false, 32, 512, 49, 8));
  CHECK((!fits(float{}, false, 64, 2048, 49, 8) && fits(float{}, false, 256, 512, 49, 8)));
  CHECK(fits(bfloat16{}, false, 256, 1024, 196, 8));
  CHECK(!fits(float{}, true, 40, 512, 784, 1));
  CHECK(!fits(float{}, false, 50, 20, 784, 1)); // too few channels to be busy with
  CHECK(fits(float{}, false, 4, 20, 784, 1));
}

TEST_CASE("Clusters are for devices which have them, and code which knows of them") {
  CHECK(gpu::runs_clusters<900>(900));
  CHECK(gpu::runs_clusters<800, 900>(900));
  CHECK(gpu::runs_clusters<900>(1000)); // by its intermediate code
  CHECK(gpu::runs_clusters<800, 900, 1000>(1000));
  CHECK(gpu::runs_clusters<900, 1200>(1000));
  CHECK(!gpu::runs_clusters<800, 900>(1000)); // perhaps by the intermediate code of 8.0
  CHECK(!gpu::runs_clusters<1000>(900));
  CHECK(!gpu::runs_clusters<800>(900));
  CHECK(!gpu::runs_clusters<800, 1000>(900));
  CHECK(!gpu::runs_clusters<800, 900>(860));
}

TEST_CASE("Reductions along rows fill waves of blocks, where pieces are not short") {
  constexpr std::int64_t wave = 528;
  CHECK(gpu::pieces_of_rows(64 * 784, 256, 256, wave, 256) == 2);
  CHECK(gpu::pieces_of_rows(256 * 3136, 64, 256, wave, 256) == 8);
  CHECK(gpu::pieces_of_rows(32 * 196, 512, 256, wave, 256) == 1);
  CHECK(gpu::pieces_of_rows(32 * 98, 256, 256, wave, 256) == 1);  // one more wave, or a ticket, takes longer
  CHECK(gpu::pieces_of_rows(64 * 196, 16, 256, wave, 256) == 4);  // of no less than 16 packs a thread
  CHECK(gpu::pieces_of_rows(64 * 784, 600, 256, wave, 256) == 4); // 4.5 waves of a quarter each, not 1.1
  CHECK(gpu::pieces_of_rows(std::int64_t{1} << 40, 1, 256, wave, 256) == 256);
  CHECK(gpu::pieces_of_rows(256 * 3136, 64, 256, wave, 5) == 5); // of no more than there is room for
  CHECK(gpu::pieces_of_rows(0, 5, 64, wave, 256) == 1);
}
