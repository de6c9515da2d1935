#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/normalize.hpp>

#include <host/tensors.hpp>

using namespace syncnorm;

namespace {

template <class T>
struct affine_problem {
  using A = accumulate_t<T>;
  std::int64_t n, c, s;
  std::vector<T> x;
  std::vector<double> mean, inv_std;
  std::vector<A> gamma, beta;

  explicit affine_problem(test::extents const& e) : n{e.n}, c{e.c}, s{e.s}, x{test::deviates<T>(e.n, e.c, e.s, 1)} {
    for (std::int64_t i = 0; i < c; ++i) {
      auto const channel = static_cast<double>(i);
      mean.push_back(0.3 + std::sin(channel) / 3);
      inv_std.push_back(1.5 + std::cos(channel) / 3);
      gamma.push_back(static_cast<A>(1 + channel / 100));
      beta.push_back(static_cast<A>(-channel / 50));
    }
  }

  [[nodiscard]] std::vector<long double> expected(bool has_gamma, bool has_beta) const {
    std::vector<long double> y;
    for (std::size_t i = 0; i < x.size(); ++i) {
      auto const channel = i / static_cast<std::size_t>(s) % static_cast<std::size_t>(c);
      long double const scaled = (static_cast<long double>(x[i]) - mean[channel]) * inv_std[channel];
      y.push_back(scaled * (has_gamma ? static_cast<long double>(gamma[channel]) : 1) +
                  (has_beta ? static_cast<long double>(beta[channel]) : 0));
    }
    return y;
  }
  [[nodiscard]] affine_parameters<A> params(bool has_gamma, bool has_beta) const {
    return {has_gamma ? std::span<A const>{gamma} : std::span<A const>{},
            has_beta ? std::span<A const>{beta} : std::span<A const>{}};
  }
};

} // namespace

TEST_CASE_TEMPLATE("y is gamma (x - mean) inv_std + beta", T, float,
                   bfloat16 AND_UNSANITIZED(double, float16, test::brief)) {
  std::size_t cells = 0;
  for (auto const& shape : test::shapes) {
    affine_problem<T> const p{shape};
    auto const expected = p.expected(true, true);
    for (auto const order : test::arrangements) {
      for (auto const how : {host::stores::cached, host::stores::streaming}) {
        for (std::int64_t const offset : {std::int64_t{0}, how == host::stores::cached ? std::int64_t{1} : 7}) {
          if (test::sanitized && cells++ % 3 > 0) continue;
          CAPTURE(test::name_of(shape));
          CAPTURE(test::name_of(order));
          CAPTURE(offset);
          test::tensor<T> x{order, p.n, p.c, p.s, p.x}, y{order, p.n, p.c, p.s, offset};
          host::normalize(host::serial_executor{}, x.view(), y.view(), p.mean, p.inv_std, p.params(true, true), how);
          CHECK(test::error_of(y.values(), expected) <= test::accuracy<T>);
          CHECK(y.intact());

          test::tensor<T> again{order, p.n, p.c, p.s, offset};
          host::normalize(test::shuffling_executor{}, x.view(), again.view(), p.mean, p.inv_std, p.params(true, true),
                          how);
          CHECK(test::error_of(again.values(), y.values()) == 0);

          test::tensor<T> in_place{order, p.n, p.c, p.s, p.x, offset};
          host::normalize(host::serial_executor{}, in_place.view(), in_place.view(), p.mean, p.inv_std,
                          p.params(true, true), how);
          CHECK(test::error_of(in_place.values(), expected) <= test::accuracy<T>);
          CHECK(in_place.intact());
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("more contiguous channels than one box has coefficients of", T, float, bfloat16) {
  affine_problem<T> const p{{2, 20'003, 3}};
  auto const expected = p.expected(true, true);
  for (auto const how : {host::stores::cached, host::stores::streaming}) {
    test::tensor<T> x{test::arrangement::nhwc, p.n, p.c, p.s, p.x}, y{test::arrangement::nhwc, p.n, p.c, p.s, 1};
    host::normalize(test::shuffling_executor{}, x.view(), y.view(), p.mean, p.inv_std, p.params(true, true), how);
    CHECK(test::error_of(y.values(), expected) <= test::accuracy<T>);
    CHECK(y.intact());
  }
}

TEST_CASE_TEMPLATE("positions that begin or end in the midst of a line of the cache follow each other", T, float,
                   bfloat16 AND_UNSANITIZED(double, float16)) {
  for (std::int64_t const channels : {1, 3, 24, 33, 64, 100, 728, 1024, 1025, 2700, 5120, 8200, 8225}) {
    if (test::sanitized && channels > 3000) continue;
    affine_problem<T> const p{{2, channels, channels > 2000 ? 7 : 50}};
    auto const expected = p.expected(true, true);
    for (std::int64_t const offset : {0, 1, 8}) {
      CAPTURE(channels);
      CAPTURE(offset);
      test::tensor<T> x{test::arrangement::nhwc, p.n, p.c, p.s, p.x}, y{test::arrangement::nhwc, p.n, p.c, p.s, offset},
          again{test::arrangement::nhwc, p.n, p.c, p.s, 3};
      auto const run = [&](auto const& exec, tensor_view<T> const& to) {
        host::normalize(exec, x.view(), to, p.mean, p.inv_std, p.params(true, true), host::stores::streaming);
      };
      run(host::serial_executor{}, y.view());
      CHECK(test::error_of(y.values(), expected) <= test::accuracy<T>);
      CHECK(y.intact());
      run(test::shuffling_executor{}, again.view());
      CHECK(again.values() == y.values());
    }
  }
}

TEST_CASE_TEMPLATE("samples share the coefficients of short rows, of all channels or of some", T, float, bfloat16) {
  for (auto const& shape :
       {test::extents{3, 300, 21}, {5, 300, 21}, {130, 300, 21}, {150, 130, 10}, {21, 12, 100}, {6, 500, 21}}) {
    CAPTURE(test::name_of(shape));
    affine_problem<T> const p{shape};
    auto const expected = p.expected(true, true);
    for (auto const how : {host::stores::cached, host::stores::streaming}) {
      test::tensor<T> x{test::arrangement::nchw, p.n, p.c, p.s, p.x}, y{test::arrangement::nchw, p.n, p.c, p.s, 1},
          again{test::arrangement::nchw, p.n, p.c, p.s, 2};
      host::normalize(host::serial_executor{}, x.view(), y.view(), p.mean, p.inv_std, p.params(true, true), how);
      CHECK(test::error_of(y.values(), expected) <= test::accuracy<T>);
      CHECK(y.intact());
      host::normalize(test::shuffling_executor{}, x.view(), again.view(), p.mean, p.inv_std, p.params(true, true), how);
      CHECK(again.values() == y.values());
    }
  }
}

TEST_CASE("without gamma or beta they are 1 and 0") {
  affine_problem<float> const p{{3, 9, 21}};
  for (bool const has_gamma : {false, true})
    for (bool const has_beta : {false, true}) {
      test::tensor<float> x{test::arrangement::nchw, p.n, p.c, p.s, p.x}, y{test::arrangement::nchw, p.n, p.c, p.s};
      host::normalize(host::serial_executor{}, x.view(), y.view(), p.mean, p.inv_std, p.params(has_gamma, has_beta));
      CHECK(test::error_of(y.values(), p.expected(has_gamma, has_beta)) <= 1e-5);
    }
}

TEST_CASE("the output may be arranged otherwise than the input") {
  affine_problem<float> const p{{3, 19, 21}};
  for (auto const from : test::arrangements)
    for (auto const to : test::arrangements) {
      test::tensor<float> x{from, p.n, p.c, p.s, p.x}, y{to, p.n, p.c, p.s};
      host::normalize(host::serial_executor{}, x.view(), y.view(), p.mean, p.inv_std, p.params(true, true));
      CHECK(test::error_of(y.values(), p.expected(true, true)) <= 1e-5);
      CHECK(y.intact());
    }
}

TEST_CASE("a large mean does not cancel") {
  std::vector<float> const values{10000, 10001, 9999, 10000.5};
  std::vector<double> const mean{10000.1}, inv_std{1};
  test::tensor<float> x{test::arrangement::nchw, 1, 1, 4, values}, y{test::arrangement::nchw, 1, 1, 4};
  host::normalize(host::serial_executor{}, x.view(), y.view(), mean, inv_std, affine_parameters<float>{});
  CHECK(test::error_of(y.values(), std::vector<long double>{-0.1L, 0.9L, -1.1L, 0.4L}) < 1e-6);
}

TEST_CASE("nothing is written where there is nothing") {
  for (auto const order : test::arrangements)
    for (auto const& shape : {test::extents{0, 5, 4}, {3, 5, 0}, {4, 0, 9}}) {
      affine_problem<float> const p{shape};
      test::tensor<float> x{order, p.n, p.c, p.s, p.x}, y{order, p.n, p.c, p.s};
      host::normalize(test::shuffling_executor{}, x.view(), y.view(), p.mean, p.inv_std, p.params(true, true));
      CHECK(y.intact());
    }
}

TEST_CASE("large outputs are streamed") {
  float value = 0;
  CHECK(host::stores_for(nchw(&value, 1, 1, host::streaming_bytes / 4)) == host::stores::cached);
  CHECK(host::stores_for(nchw(&value, 1, 1, host::streaming_bytes / 4 + 1)) == host::stores::streaming);
}
