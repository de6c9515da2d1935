#pragma once

#if !defined(__cpp_rtti)
#error "syncnorm/adapters/gloo_context.hpp needs to know the types of objects: compile without -fno-rtti"
#endif

#include <net/if.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <gloo/common/error.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <syncnorm/adapters/detail/batch_threads.hpp>
#include <syncnorm/adapters/detail/broken_pipe.hpp>
#include <syncnorm/adapters/detail/gloo_mesh.hpp>
#include <syncnorm/adapters/detail/gloo_stores.hpp>
#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/comm/timeout.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

struct gloo_context_options {
  /// The address or name of this host that its peers can reach. None: the host's name, or loopback where that has no
  /// address.
  std::string hostname{};
  /// The network interface to listen on, such as "eth0"; goes before `hostname`.
  std::string interface {};
  /// How long to wait for the other ranks, and the timeout of the context.
  std::chrono::milliseconds timeout = default_timeout;
  /// Tells runs apart that meet in one store. A store that may hold what an earlier run left behind needs another prefix.
  std::string prefix = "syncnorm";
  /// Whether Gloo's thread gives way to those that compute: by Linux's policy SCHED_BATCH, where the caller's own is
  /// SCHED_OTHER. On busy cores it otherwise preempts a thread whose lock it then spins for, until the scheduler's next
  /// tick. What is exchanged behind computations may arrive later for it.
  bool thread_gives_way = true;
};

/// A store for the ranks to meet in: "hash" (the threads of one process, which share the pointer), "file:DIRECTORY"
/// (made if absent; on a file system that all ranks see) or "redis:HOST:PORT". Local. Throws invalid_argument_error where
/// the text is none of these, and gloo_error where the directory or the server cannot be used.
[[nodiscard]] inline std::shared_ptr<gloo::rendezvous::Store> make_gloo_store(std::string const& spec);

/// A context of `size` ranks, all connected to each other over TCP, of which this is rank `rank`. Collective over the
/// ranks that give the same prefix and size. On success a file store, and a Redis store of `make_gloo_store`, hold nothing
/// of this run any more; other stores still do. Throws invalid_argument_error where the rank is not in [0, size) or the timeout
/// not positive; timeout_error, naming them, where ranks have not registered within the timeout, which then starts anew for the
/// connections, or where a connection or an answer of Redis takes longer; then this rank's registration is taken back where a
/// file or Redis store of `make_gloo_store` has it; gloo_error where a rank is registered already, or another size is, or a rank
/// that registered has ended, or where the interface or the host is unknown, or no connection can be listened for.
[[nodiscard]] inline std::shared_ptr<gloo::Context>
make_gloo_context(int rank, int size, gloo::rendezvous::Store& store, gloo_context_options const& options = {});

namespace detail {

inline std::shared_ptr<gloo::rendezvous::Store> make_file_store(std::string const& path) {
  std::error_code problem;
  std::filesystem::create_directories(path, problem);
  auto const probe = std::filesystem::path{path} / (".probe" + std::to_string(getpid()));
  if (!problem && !std::filesystem::is_directory(path, problem) && !problem)
    problem = std::make_error_code(std::errc::not_a_directory);
  if (!problem) {
    if (auto* const file = std::fopen(probe.c_str(), "w")) {
      std::fclose(file);
      std::filesystem::remove(probe, problem);
    } else {
      problem = {errno, std::generic_category()};
    }
  }
  if (problem) throw gloo_error{"store file:" + path + ": " + problem.message()};
  return std::make_shared<punctual_store<gloo::rendezvous::FileStore>>(path);
}

inline std::shared_ptr<gloo::rendezvous::Store> make_redis_store([[maybe_unused]] std::string const& host,
                                                                 [[maybe_unused]] int port) {
#if SYNCNORM_HAVE_GLOO_REDIS
  try {
    return std::make_shared<punctual_store<gloo::rendezvous::RedisStore>>(host, port);
  } catch (std::exception const& failure) {
    throw gloo_error{"store redis:" + host + ":" + std::to_string(port) + ": " + failure.what()};
  }
#else
  throw gloo_error{"store redis:" + host + ": this program was compiled without hiredis, or against a Gloo without it"};
#endif
}

/// Whether the name has an address: Gloo's own look-up is undefined where it has none.
inline bool resolves(std::string const& hostname) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(hostname.c_str(), nullptr, &hints, &found) != 0) return false;
  freeaddrinfo(found);
  return true;
}

inline std::shared_ptr<gloo::transport::Device> make_gloo_device(gloo_context_options const& options) {
  gloo::transport::tcp::attr attributes;
  attributes.iface = options.interface;
  attributes.hostname = options.hostname;
  if (!attributes.iface.empty()) {
    if (if_nametoindex(attributes.iface.c_str()) == 0) // Gloo's own look-up leaks memory where there is none
      throw gloo_error{"there is no network interface '" + attributes.iface + "'"};
  } else if (attributes.hostname.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof name - 1) != 0 || !resolves(name)) std::strcpy(name, "127.0.0.1");
    attributes.hostname = name;
  } else if (!resolves(attributes.hostname)) {
    throw gloo_error{"the host name '" + options.hostname + "' has no address"};
  }
  std::optional<batch_threads> giving_way;
  if (options.thread_gives_way) giving_way.emplace();
  try {
    return gloo::transport::tcp::CreateDevice(attributes);
  } catch (std::exception const& failure) {
    throw gloo_error{"cannot listen on " +
                     (options.interface.empty() ? "host '" + attributes.hostname : "interface '" + options.interface) +
                     "': " + failure.what()};
  }
}

/// What a rank registers: the number of ranks, and the addresses that each of them is to connect to.
class gloo_card {
public:
  explicit gloo_card(gloo_mesh& mesh) : bytes_(sizeof(std::int32_t)) {
    std::int32_t const size = mesh.size;
    std::memcpy(bytes_.data(), &size, sizeof size);
    std::size_t length = 0;
    for (int r = 0; r < mesh.size; ++r)
      if (r != mesh.rank) length = mesh.address_for(r).size();
    for (int r = 0; r < mesh.size; ++r) {
      auto const address = r == mesh.rank ? std::vector<char>(length) : mesh.address_for(r);
      bytes_.insert(bytes_.end(), address.begin(), address.end());
    }
  }
  gloo_card(std::vector<char> bytes, int rank, int size) : bytes_{std::move(bytes)} {
    std::int32_t found = 0;
    if (bytes_.size() >= sizeof found) std::memcpy(&found, bytes_.data(), sizeof found);
    if (found != size)
      throw gloo_error{"rendezvous: rank " + std::to_string(rank) + " registered as one of " + std::to_string(found) +
                       " ranks, this rank as one of " + std::to_string(size)};
  }
  [[nodiscard]] std::vector<char> const& bytes() const { return bytes_; }
  [[nodiscard]] std::vector<char> address_for(int rank, int size) const {
    auto const length =
        static_cast<std::ptrdiff_t>((bytes_.size() - sizeof(std::int32_t)) / static_cast<std::size_t>(size));
    auto const first = bytes_.begin() + static_cast<std::ptrdiff_t>(sizeof(std::int32_t)) + length * rank;
    return {first, first + length};
  }

private:
  std::vector<char> bytes_;
};

} // namespace detail

inline std::shared_ptr<gloo::rendezvous::Store> make_gloo_store(std::string const& spec) {
  if (spec == "hash") return std::make_shared<gloo::rendezvous::HashStore>();
  if (spec.starts_with("file:") && spec.size() > 5) return detail::make_file_store(spec.substr(5));
  if (spec.starts_with("redis:")) {
    auto const colon = spec.rfind(':');
    int port = 0;
    auto const* const last = spec.data() + spec.size();
    auto const [end, code] = std::from_chars(spec.data() + colon + 1, last, port);
    if (colon > 6 && code == std::errc{} && end == last && port > 0 && port < 65536)
      return detail::make_redis_store(spec.substr(6, colon - 6), port);
  }
  throw invalid_argument_error{"'" + spec + "' is no store; expected hash, file:DIRECTORY or redis:HOST:PORT"};
}

inline std::shared_ptr<gloo::Context> make_gloo_context(int rank, int size, gloo::rendezvous::Store& store,
                                                        gloo_context_options const& options) {
  if (size < 1 || rank < 0 || rank >= size)
    throw invalid_argument_error{"make_gloo_context: rank " + std::to_string(rank) + " is not in [0, " +
                                 std::to_string(size) + ")"};
  auto const timeout = detail::checked_timeout("make_gloo_context", options.timeout);
  if (size > 1) detail::ignore_broken_pipes();
  auto const mesh = [&] {
    try {
      return std::make_shared<detail::gloo_mesh>(rank, size, size > 1 ? detail::make_gloo_device(options) : nullptr,
                                                 timeout);
    } catch (error const&) {
      throw;
    } catch (std::exception const& failure) {
      throw gloo_error{std::string{"cannot listen: "} + failure.what()};
    }
  }();
  if (size == 1) return mesh;

  using clock = std::chrono::steady_clock;
  auto const deadline = clock::now() + timeout;
  auto const key = [&](int r) { return options.prefix + "/" + std::to_string(r); };
  auto* const own_store = dynamic_cast<detail::rendezvous_store*>(&store);
  auto const take_back = [&] {
    if (own_store != nullptr) own_store->take_back(key(rank));
  };
  auto const after_timeout = "after " + std::to_string(timeout.count()) + " ms ";
  if (own_store != nullptr) own_store->limit(timeout);
  auto const registered = [&](int r, clock::time_point until) {
    auto const left = std::chrono::ceil<std::chrono::milliseconds>(until - clock::now());
    try {
      store.wait({key(r)}, std::max(std::chrono::milliseconds{1}, left)); // zero would wait for ever
      return true;
    } catch (gloo::IoException const&) {
      if (clock::now() < until) throw;
      return false;
    }
  };
  try {
    try {
      store.set(key(rank), detail::gloo_card{*mesh}.bytes());
    } catch (std::exception const& failure) {
      if (clock::now() >= deadline)
        throw timeout_error{"gloo",
                            "rendezvous: " + after_timeout + "the store has not answered (" + failure.what() + ")"};
      throw gloo_error{"rendezvous: rank " + std::to_string(rank) + " cannot register under prefix '" + options.prefix +
                       "'; is the rank started twice, or the prefix an earlier run's? (" + failure.what() + ")"};
    }
    // In turns, so that a rank that gives up before this one, and takes its registration back, has been seen.
    std::vector<std::optional<detail::gloo_card>> cards(static_cast<std::size_t>(size));
    constexpr int turns = 8;
    for (int turn = 1; turn <= turns; ++turn)
      for (int r = 0; r < size; ++r)
        if (auto& card = cards[static_cast<std::size_t>(r)];
            !card && registered(r, deadline - timeout * (turns - turn) / turns))
          card.emplace(store.get(key(r)), r, size);
    std::string missing;
    for (int r = 0; r < size; ++r)
      if (!cards[static_cast<std::size_t>(r)]) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    if (!missing.empty())
      throw timeout_error{"gloo", "rendezvous: " + after_timeout + "of ranks 0 to " + std::to_string(size - 1) +
                                      " there are missing under prefix '" + options.prefix + "': " + missing};
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      auto const began = clock::now();
      try {
        mesh->connect(r, cards[static_cast<std::size_t>(r)]->address_for(rank, size));
      } catch (std::exception const& failure) {
        bool const is_late = clock::now() - began >= timeout;
        std::string const what = "rendezvous: " + (is_late ? after_timeout : std::string{}) + "connecting to rank " +
                                 std::to_string(r) + "; has it ended, or is the prefix '" + options.prefix +
                                 "' an earlier run's? (" + failure.what() + ")";
        if (is_late) throw timeout_error{"gloo", what};
        throw gloo_error{what};
      }
    }
    // Nobody reads the store after this.
    gloo_communicator{mesh, timeout}.barrier();
  } catch (timeout_error const&) {
    // By now the others have read it, if they came. After another error they have yet to.
    take_back();
    throw;
  } catch (error const&) {
    throw;
  } catch (std::exception const& failure) {
    throw gloo_error{std::string{"rendezvous: "} + failure.what()};
  }
  take_back();
  if (auto* const files = dynamic_cast<gloo::rendezvous::FileStore*>(&store)) {
    std::error_code ignored;
    for (auto const& path : files->getAllKeyFilePaths()) std::filesystem::remove(path, ignored);
  }
  return mesh;
}

} // namespace syncnorm
