#pragma once

#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <syncnorm/adapters/detail/collective_header.hpp>
#include <syncnorm/adapters/detail/copy_bytes.hpp>
#include <syncnorm/adapters/detail/lasting_failure.hpp>
#include <syncnorm/adapters/detail/mpi_include.hpp>
#include <syncnorm/adapters/mpi_error.hpp>

namespace syncnorm::detail {

inline void require_mpi(int code, char const* call) {
  if (code != MPI_SUCCESS) throw mpi_error{call, code};
}

inline void require_mpi_running() {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) throw mpi_error{"MPI is not initialized; call MPI_Init before making a communicator"};
  MPI_Finalized(&finalized);
  if (finalized != 0) throw mpi_error{"MPI has been finalized"};
}

/// Memory that MPI may go on writing to, and the operation that is using it. Reused.
struct mpi_slot {
  /// Called when every request has completed: takes the result out.
  using step = void (*)(mpi_slot&);

  /// Bytes, kept from the last operation where that needed as many.
  struct memory {
    std::unique_ptr<std::byte[]> data;
    std::size_t capacity = 0;

    void hold(std::size_t needed) {
      if (needed <= capacity) return;
      data = std::make_unique_for_overwrite<std::byte[]>(needed);
      capacity = needed;
    }
  };

  memory sent, received;
  collective_header header;               // what this rank says
  std::vector<collective_header> headers; // what every rank says, if they are to agree; gathered by the first request
  bool agreed = true;
  bool started = false; // any request
  std::vector<MPI_Request> requests;
  std::size_t completed = 0; // of requests
  std::chrono::steady_clock::time_point deadline;
  MPI_Comm made = MPI_COMM_NULL; // what a duplication is to give
  int ranks = 0;
  step finish = nullptr;

  std::byte* out = nullptr;
  std::size_t bytes = 0; // of one rank's part of `out`
  std::size_t pitch = 0; // from one rank's part of `out` to the next
  std::size_t received_pitch = 0;

  [[nodiscard]] std::byte* part(int r) const { return out + pitch * static_cast<std::size_t>(r); }
  [[nodiscard]] std::byte* received_from(int r) const {
    return received.data.get() + received_pitch * static_cast<std::size_t>(r);
  }
};

/// How many bytes the unit has in which `bytes` are counted, so that the count fits an int: a power of two.
constexpr std::size_t mpi_unit(std::size_t bytes, std::size_t most = INT_MAX) {
  std::size_t unit = 1;
  while ((bytes + unit - 1) / unit > most) unit *= 2;
  return unit;
}

/// An MPI communicator, and the operations in flight on it.
class mpi_channel {
public:
  using clock = std::chrono::steady_clock;

  mpi_channel(MPI_Comm comm, bool owned, std::chrono::milliseconds timeout)
      : comm_{comm}, owned_{owned}, timeout_{timeout} {
    require_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    require_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  }
  mpi_channel(mpi_channel const&) = delete;
  mpi_channel& operator=(mpi_channel const&) = delete;
  ~mpi_channel() {
    int finalized = 0;
    // Freeing a communicator with an operation that never completes would wait for it.
    if (owned_ && !failure_.has_happened() && MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0)
      MPI_Comm_free(&comm_);
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] MPI_Comm comm() const noexcept { return comm_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  /// A slot for the collective that `header` says.
  [[nodiscard]] std::unique_ptr<mpi_slot> open(collective_header const& header) {
    require_mpi_running();
    require_usable();
    std::unique_ptr<mpi_slot> slot;
    if (free_.empty()) {
      slot = std::make_unique<mpi_slot>();
    } else {
      slot = std::move(free_.back());
      free_.pop_back();
    }
    slot->deadline = clock::now() + timeout_;
    slot->header = header;
    slot->header.called.sequence = sequence_;
    slot->started = false;
    slot->ranks = size_;
    slot->agreed = true;
    slot->requests.clear();
    slot->requests.reserve(2);
    slot->completed = 0;
    slot->finish = nullptr;
    return slot;
  }
  /// Gives the slot of an operation that has completed back.
  void close(std::unique_ptr<mpi_slot> slot) {
    if (slot->completed != slot->requests.size()) return keep_for_ever(std::move(slot));
    try {
      free_.push_back(std::move(slot));
    } catch (std::bad_alloc const&) { // another one is made
    }
  }

  /// Starts finding out whether every rank says the same of the operation. That is known before any other request of
  /// it is tested: of unequal extents, Open MPI makes an error of MPI_COMM_WORLD, which by default ends the process.
  void agree(mpi_slot& slot) {
    slot.agreed = false;
    slot.headers.resize(static_cast<std::size_t>(size_));
    constexpr int bytes = sizeof(collective_header);
    start(slot, "MPI_Iallgather", [&](MPI_Request* request) {
      return MPI_Iallgather(&slot.header, bytes, MPI_BYTE, slot.headers.data(), bytes, MPI_BYTE, comm_, request);
    });
  }

  /// How much a rank may send beside its header, before it is known that all ranks say the same.
  static constexpr std::size_t most_unagreed = 256 * 1024;

  /// Starts gathering the data of every rank, and before it, where told, `agree`. Where processes share memory, Open MPI writes
  /// all that a rank sends, however little was to be received; so there is room for that behind the last rank's part.
  void gather(mpi_slot& slot, std::span<std::byte const> data, bool agrees) {
    auto const unit = mpi_unit(data.size());
    auto const count = static_cast<int>((data.size() + unit - 1) / unit);
    slot.received_pitch = static_cast<std::size_t>(count) * unit;
    slot.sent.hold(slot.received_pitch);
    slot.received.hold(slot.received_pitch * static_cast<std::size_t>(size_) + most_unagreed);
    copy_bytes(slot.sent.data.get(), data.data(), data.size());
    MPI_Datatype type = MPI_BYTE;
    if (unit > 1) {
      require_mpi(MPI_Type_contiguous(static_cast<int>(unit), MPI_BYTE, &type), "MPI_Type_contiguous");
      require_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
    }
    if (agrees) agree(slot);
    start(slot, "MPI_Iallgather", [&](MPI_Request* request) {
      return MPI_Iallgather(slot.sent.data.get(), count, type, slot.received.data.get(), count, type, comm_, request);
    });
    if (unit > 1) MPI_Type_free(&type); // takes effect when the operation has completed
  }

  /// Starts one nonblocking operation: call(request), whose request there is room for.
  template <class Call>
  void start(mpi_slot& slot, char const* name, Call call) {
    MPI_Request request = MPI_REQUEST_NULL;
    // For want of memory an operation may never come to this; it is none then.
    if (!std::exchange(slot.started, true)) ++sequence_;
    int const code = call(&request);
    if (request != MPI_REQUEST_NULL) slot.requests.push_back(request);
    if (code == MPI_SUCCESS) return;
    mpi_error const failure{name, code};
    fail(failure.message());
    throw failure;
  }

  /// Returns whether the operation has completed; throws what failed, and timeout_error past the deadline.
  bool test(mpi_slot& slot) {
    if (!requests_completed(slot)) {
      if (clock::now() >= slot.deadline) time_out(slot);
      require_usable();
      return false;
    }
    complete(slot);
    return true;
  }

  /// Returns when the operation has completed; throws as `test`.
  void wait(mpi_slot& slot) {
    using namespace std::chrono_literals;
    // A peer that is ready answers while this spins. Then others may need the core, and then the wait is a long one. MPI may
    // yield in each look, which on a core that others use takes milliseconds.
    auto const started = clock::now();
    for (int i = 0; i < 256 && clock::now() - started < 2ms; ++i)
      if (requests_completed(slot)) return complete(slot);
    while (!test(slot)) {
      if (clock::now() - started < 2ms)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(20us);
    }
  }

  void fail(std::string const& reason) { failure_.happen(reason); }

private:
  void require_usable() {
    if (failure_.has_happened()) throw mpi_error{failure_.text()};
  }

  bool requests_completed(mpi_slot& slot) {
    // A layer that outlives MPI may have an exchange in flight, for which its destructor waits.
    if (slot.completed < slot.requests.size()) require_mpi_running();
    for (; slot.completed < slot.requests.size(); ++slot.completed) {
      int done = 0;
      int const code = MPI_Test(&slot.requests[slot.completed], &done, MPI_STATUS_IGNORE);
      if (code != MPI_SUCCESS) {
        mpi_error const failure{describe(slot.header.called), code};
        fail(failure.message());
        throw failure;
      }
      if (done == 0) return false;
      if (!slot.agreed) require_agreed(slot);
    }
    return true;
  }

  void require_agreed(mpi_slot& slot) {
    slot.agreed = true;
    try {
      require_agreement(size_, [&](int r) { return slot.headers[static_cast<std::size_t>(r)]; });
    } catch (mismatch_error const& failure) {
      // What was started besides may be of unequal extents, whose effect on the communicator MPI leaves open.
      fail(failure.what());
      throw;
    } catch (error const&) {
      ++slot.completed; // where the root's extent matters, this is the only request, and it is done
      throw;
    }
  }

  static void complete(mpi_slot& slot) {
    if (slot.finish) slot.finish(slot);
  }

  [[noreturn]] void time_out(mpi_slot const& slot) {
    timeout_error const failure{"mpi", "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " waited " +
                                           std::to_string(timeout_.count()) + " ms for its peers in " +
                                           describe(slot.header.called)};
    fail(failure.message());
    throw failure;
  }

  /// MPI cannot cancel a collective, so what it may still write to must outlive even the communicator.
  static void keep_for_ever(std::unique_ptr<mpi_slot> slot) {
    static std::mutex mutex;
    static auto& kept = *new std::vector<std::unique_ptr<mpi_slot>>;
    std::lock_guard const lock{mutex};
    try {
      kept.push_back(std::move(slot));
    } catch (std::bad_alloc const&) {
      static_cast<void>(slot.release());
    }
  }

  MPI_Comm comm_;
  bool owned_;
  std::chrono::milliseconds timeout_;
  int rank_ = 0;
  int size_ = 1;
  std::int64_t sequence_ = 0;
  std::vector<std::unique_ptr<mpi_slot>> free_;
  lasting_failure failure_;
};

} // namespace syncnorm::detail
