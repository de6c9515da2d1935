#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/syncnorm.hpp>

#include "support/allocations.hpp"

namespace {

int allocations_after_first_step(int ranks, std::int64_t samples, std::int64_t channels, std::int64_t spatial) {
  static_cast<void>(test::take_allocations());
  syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
    std::vector<float> x(static_cast<std::size_t>(samples * channels * spatial)), y(x.size()), dy(x.size()),
        dx(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(i % 97);
      dy[i] = static_cast<float>(i % 89);
    }
    auto const view = [&](auto* data) { return syncnorm::nchw(data, samples, channels, spatial); };
    syncnorm::batch_norm<float, syncnorm::thread_communicator> layer{comm, channels};
    auto const step = [&] {
      layer.forward(view(static_cast<float const*>(x.data())), view(y.data()));
      layer.backward(view(static_cast<float const*>(x.data())), view(static_cast<float const*>(dy.data())),
                     view(dx.data()));
    };
    step();
    test::count_allocations(true);
    for (int i = 0; i < 4; ++i) step();
    test::count_allocations(false);
  });
  return test::take_allocations();
}

} // namespace

TEST_CASE("a step after the first allocates nothing") {
  CHECK(allocations_after_first_step(1, 4, 24, 49) == 0);
  CHECK(allocations_after_first_step(2, 4, 24, 49) == 0);
  CHECK(allocations_after_first_step(2, 4, 200, 9) == 0);
  CHECK(allocations_after_first_step(3, 64, 16, 1) == 0);
  // Exchanged in parts.
  CHECK(allocations_after_first_step(2, 8, 96, 1568) == 0);
}

TEST_CASE("allocations are counted") {
  static_cast<void>(test::take_allocations());
  test::count_allocations(true);
  std::vector<double> const values(100);
  test::count_allocations(false);
  CHECK(values.size() == 100);
  CHECK(test::take_allocations() == 1);
}
