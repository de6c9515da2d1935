#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/huge_pages.hpp>

#include <support/page_flags.hpp>

namespace {

/// One thread for each index.
struct threads_executor {
  [[nodiscard]] static int concurrency() { return 4; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    std::vector<std::jthread> threads;
    for (std::int64_t i = 0; i < n; ++i) threads.emplace_back([&f, i] { f(i); });
  }
};

struct mapping {
  std::size_t bytes;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

  explicit mapping(std::size_t size) : bytes{size} { REQUIRE(data != MAP_FAILED); }
  ~mapping() { munmap(data, bytes); }
  mapping(mapping const&) = delete;
  mapping& operator=(mapping const&) = delete;
};

} // namespace

TEST_CASE("huge pages are asked for, and values stay, of memory that begins and ends anywhere") {
  constexpr std::size_t size = std::size_t{9} << 20;
  for (std::size_t const begin : {0U, 64U, 5000U})
    for (std::size_t const left : {0U, 1U, 70'000U}) {
      CAPTURE(begin);
      CAPTURE(left);
      mapping const memory{size};
      auto* const data = static_cast<unsigned char*>(memory.data);
      for (std::size_t i = 0; i < size; i += 1000) data[i] = static_cast<unsigned char>(i / 1000 % 251);
      syncnorm::host::use_huge_pages(threads_executor{}, data + begin, size - begin - left);
      bool stayed = true;
      for (std::size_t i = 0; i < size; ++i) stayed &= data[i] == (i % 1000 == 0 ? i / 1000 % 251 : 0);
      CHECK(stayed);
      CHECK(test_support::asks_for_huge_pages(data + begin).value_or(true));
      CHECK(test_support::asks_for_huge_pages(data + size - left - 1).value_or(true));
    }
}

TEST_CASE("no huge pages are asked for where there is no memory, or not for this memory") {
  mapping const memory{std::size_t{4} << 20};
  syncnorm::host::use_huge_pages(syncnorm::host::serial_executor{}, memory.data, 0);
  syncnorm::host::use_huge_pages(syncnorm::host::serial_executor{}, nullptr, 0);
  CHECK_FALSE(test_support::asks_for_huge_pages(memory.data).value_or(false));
}
