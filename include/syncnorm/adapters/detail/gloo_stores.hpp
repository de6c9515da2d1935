#pragma once

#include <chrono>
#include <filesystem>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/config.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/store.h>

#if GLOO_USE_REDIS && __has_include(<hiredis.h>)
#define SYNCNORM_HAVE_GLOO_REDIS 1
#include <gloo/rendezvous/redis_store.h>
#elif GLOO_USE_REDIS && __has_include(<hiredis/hiredis.h>)
#define SYNCNORM_HAVE_GLOO_REDIS 1
#ifdef HIREDIS_NESTED_INCLUDE
#include <gloo/rendezvous/redis_store.h>
#else
#define HIREDIS_NESTED_INCLUDE
#include <gloo/rendezvous/redis_store.h>
#undef HIREDIS_NESTED_INCLUDE
#endif
#else
#define SYNCNORM_HAVE_GLOO_REDIS 0
#endif

namespace syncnorm::detail {

/// A store for one rendezvous after another.
class rendezvous_store {
public:
  /// Takes back what this rank set, if the store can.
  virtual void take_back(std::string const& key) = 0;
  /// How long a server may take to answer, if there is one: by itself it may take for ever.
  virtual void limit(std::chrono::milliseconds timeout) = 0;

protected:
  ~rendezvous_store() = default;
};

/// A store of Gloo's that waits as long as it is told to. Gloo's own count whole seconds.
template <class Base>
class punctual_store final : public Base, public rendezvous_store {
public:
  using Base::Base;
  using Base::wait;

  /// Gloo's file store keeps a list of what was set, which ranks that are threads would change at the same time.
  void set(std::string const& key, std::vector<char> const& data) override {
    std::lock_guard const lock{setting_};
    Base::set(key, data);
  }

  void take_back(std::string const& key) override {
    if constexpr (requires { &punctual_store::objectPath; }) {
      std::error_code ignored;
      std::filesystem::remove(this->objectPath(key), ignored);
    } else if constexpr (requires(punctual_store & store) { store.redis_; }) {
      freeReplyObject(redisCommand(this->redis_, "DEL %b", key.data(), key.size()));
    }
  }

  void limit([[maybe_unused]] std::chrono::milliseconds timeout) override {
    if constexpr (requires(punctual_store & store) { store.redis_; })
      redisSetTimeout(this->redis_, {timeout.count() / 1000, timeout.count() % 1000 * 1000});
  }

  void wait(std::vector<std::string> const& keys, std::chrono::milliseconds const& timeout) override {
    auto const deadline = std::chrono::steady_clock::now() + timeout;
    for (auto pause = std::chrono::milliseconds{1}; !this->check(keys); pause = std::chrono::milliseconds{10}) {
      if (std::chrono::steady_clock::now() >= deadline)
        throw gloo::IoException{"nothing under " + keys.front() + " after " + std::to_string(timeout.count()) + " ms"};
      std::this_thread::sleep_for(pause);
    }
  }

private:
  std::mutex setting_;
};

} // namespace syncnorm::detail
