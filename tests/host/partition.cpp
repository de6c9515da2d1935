#include <algorithm>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/channel_block.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>

using namespace syncnorm;
using host::detail::boxes, host::detail::groups, host::detail::row_cut;

TEST_CASE("groups hold every position of every sample once, in order") {
  constexpr auto longest = row_cut::longest<double>;
  for (std::int64_t const n : {0, 1, 3, 64, 700})
    for (std::int64_t const s : {0, 1, 7, 1024, 1025, 5000}) {
      groups const parts{n, s, longest};
      CHECK(parts.count <= groups::most);
      CHECK(parts.count * parts.length - parts.pieces < std::max<std::int64_t>(1, parts.count));
      std::int64_t next = 0, total = 0;
      for (std::int64_t g = 0; g < parts.count; ++g) {
        std::int64_t in_group = 0;
        parts.for_each_piece(g, [&](groups::piece const& now) {
          auto const [sample, begin, length] = now;
          CHECK(sample * s + begin == next);
          CHECK(length > 0);
          CHECK(length <= longest);
          next += length;
          in_group += length;
        });
        CHECK(parts.elements(g) == in_group);
        total += in_group;
      }
      CHECK(total == n * s);
    }
}

TEST_CASE("what is fetched is what is read so many pieces later, in the order of some channels") {
  struct read {
    std::int64_t sample, begin, channel;
    bool operator==(read const&) const = default;
  };
  for (std::int64_t const s : {1, 700, 1025, 5000})
    for (std::int64_t const channels : {1, 2, 5})
      for (std::int64_t const later : {1, 2, 3, 5, 11}) {
        groups const parts{40, s, row_cut::longest<double>};
        std::vector<read> order, fetched;
        for (std::int64_t g = 0; g < parts.count; ++g)
          for_each_piece_read(parts, g, channels, {later, 1},
                              [&](groups::piece const& now, host::detail::read_ahead const& ahead) {
                                for (std::int64_t c = 0; c < channels; ++c) {
                                  auto const to = ahead.after(c, channels);
                                  order.push_back({now.sample, now.begin, c});
                                  fetched.push_back({to.piece.sample, to.piece.begin, to.channel});
                                }
                              });
        auto const distance = static_cast<std::size_t>(later);
        REQUIRE(order.size() > distance);
        CHECK(std::equal(order.begin() + later, order.end(), fetched.begin(), fetched.end() - later));
        CHECK(fetched.back().sample >= parts.pieces / parts.cut.pieces);
      }
}

TEST_CASE("boxes hold every element once") {
  for (std::int64_t const n : {0, 1, 5, 40})
    for (std::int64_t const c : {0, 1, 3, 100, 1100})
      for (std::int64_t const s : {0, 1, 9, 150}) {
        boxes const tasks{n, c, s, 1024};
        std::vector<int> seen(static_cast<std::size_t>(n * c * s));
        for (std::int64_t i = 0; i < tasks.count(); ++i) {
          auto const b = tasks[i];
          for (std::int64_t j = b.sample; j < b.sample + b.samples; ++j)
            for (std::int64_t k = b.channel; k < b.channel + b.channels; ++k)
              for (std::int64_t l = b.position; l < b.position + b.positions; ++l)
                ++seen[static_cast<std::size_t>((j * c + k) * s + l)];
        }
        CHECK(std::ranges::all_of(seen, [](int times) { return times == 1; }));
      }
  boxes const large{2, 3, 1 << 22, 1024};
  CHECK(large.count() >= 24 * (1 << 20) / boxes::box_elements / 2);
}

TEST_CASE("boxes of short rows hold whole rows") {
  for (std::int64_t const s : {17, 20, 25, 49, 100, 1000})
    for (std::int64_t const c : {5'000, 6'000, 8'500, 20'000}) CHECK(boxes{20, c, s, 16}[0].positions == s);
}

TEST_CASE("a channel block fits the cache, and is at least one row or one line") {
  float* const x = nullptr;
  constexpr host::block_room half_megabyte{1 << 19}, pages{1 << 18, 1 << 12};
  CHECK(host::channel_block(nchw(x, 32, 512, 784), 1, half_megabyte) == 5);
  CHECK(host::channel_block(nchw(x, 32, 64, 112 * 112), 1, half_megabyte) == 1);
  CHECK(host::channel_block(nchw(x, 1, 8, 4), 1, half_megabyte) == 8);
  CHECK(host::channel_block(nchw(x, 0, 8, 4), 1, half_megabyte) == 8);
  CHECK(host::channel_block(nchw(x, 32, 512, 784), 2, half_megabyte) == 2);
  CHECK(host::channel_block(nchw(x, 1024, 512, 16), 1, half_megabyte) == 512); // of 8, a sample has half a kilobyte
  CHECK(host::channel_block(nchw(x, 1024, 512, 256), 1, half_megabyte) == 1);
  CHECK(host::channel_block(nc(x, 256, 1024), 1, half_megabyte) == 512);
  CHECK(host::channel_block(nc(x, 4096, 1024), 1, half_megabyte) == 1024);
  CHECK(host::channel_block(nhwc(x, 32, 512, 784), 1, half_megabyte) == 512);
  CHECK(host::channel_block(nchw(x, 32, 512, 784), 1, pages) == 1);
  CHECK(host::channel_block(nchw(x, 32, 1024, 196), 1, pages) == 4); // which are whole lines
  CHECK(host::channel_block(nchw(x, 16, 512, 784), 1, pages) == 5);  // more than three pages
  CHECK(host::channel_block(nhwc(x, 32, 512, 784), 1, pages) == 512);
}
