#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace simt {

/// What a kernel did that it may not do.
class violation : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

/// Who accesses memory, and when: `epoch` counts the barriers of its block. `seen[b]`: what block b did in epochs before
/// that has happened before, by atomics.
struct accessor {
  int block = 0, thread = 0;
  unsigned epoch = 0;
  std::vector<unsigned> const* seen = nullptr;
  std::vector<unsigned> const* seen_alone =
      nullptr;        ///< by this thread and not yet, for lack of a barrier, by its block
  bool early = false; ///< while the launch before may still write

  [[nodiscard]] bool follows(int other_block, int other_thread, unsigned other_epoch) const {
    if (other_block == block) return other_thread == thread || other_epoch < epoch;
    auto const b = static_cast<std::size_t>(other_block);
    return std::max((*seen)[b], (*seen_alone)[b]) > other_epoch;
  }
  [[nodiscard]] std::string name() const {
    return "thread " + std::to_string(thread) + " of block " + std::to_string(block);
  }
};

enum class access : std::uint8_t { read, write, atomic };

/// A range of memory that a kernel may access, with who accessed it last, number by number.
class buffer {
public:
  buffer(std::string name, void const* data, std::size_t bytes, std::size_t grain, bool writable, bool initialized)
      : name_{std::move(name)}, begin_{reinterpret_cast<std::uintptr_t>(data)}, bytes_{bytes}, grain_{grain},
        writable_{writable}, initialized_{initialized}, pages_(((bytes + grain - 1) / grain + page - 1) / page) {}

  [[nodiscard]] bool contains(std::uintptr_t at) const { return at >= begin_ && at < begin_ + bytes_; }
  [[nodiscard]] std::string const& name() const { return name_; }

  /// Forgets who accessed what.
  void settle() {
    for (auto& cells : pages_)
      for (auto& each : cells) {
        each.fresh = each.writer.block >= 0;
        each.writer.block = each.reader.block = -1;
      }
  }

  /// Whether an access of `bytes` bytes is within the buffer, and aligned.
  void check_place(std::uintptr_t at, std::size_t bytes, accessor const& by) const {
    if (at + bytes > begin_ + bytes_) fail("out of bounds", at, bytes, by);
    if (at % bytes != 0) fail("misaligned access", at, bytes, by);
  }

  void check(std::uintptr_t at, std::size_t bytes, access how, accessor const& by) {
    auto const fail = [&](std::string const& what) { this->fail(what, at, bytes, by); };
    check_place(at, bytes, by);
    if (how != access::read && !writable_) fail("write to what is read alone");
    auto const first = (at - begin_) / grain_, last = (at - begin_ + bytes - 1) / grain_;
    for (auto i = first; i <= last; ++i) {
      auto& cells = pages_[i / page];
      if (cells.empty()) cells.assign(page, {{}, {}, initialized_});
      auto& each = cells[i % page];
      auto const races = [&](who const& other) {
        return other.block >= 0 && !(other.atomic && how == access::atomic) &&
               !by.follows(other.block, other.thread, other.epoch);
      };
      if (how == access::read && !each.initialized) fail("read of what was never written");
      if (by.early && each.fresh) fail("read of what the launch before may not have written yet");
      if (races(each.writer))
        fail("race with a write of thread " + std::to_string(each.writer.thread) + " of block " +
             std::to_string(each.writer.block));
      if (how != access::read && races(each.reader))
        fail("race with a read of thread " + std::to_string(each.reader.thread) + " of block " +
             std::to_string(each.reader.block));
      (how == access::read ? each.reader : each.writer) = {by.block, by.thread, by.epoch, how == access::atomic};
      if (how != access::read) each.initialized = true;
    }
  }

private:
  struct who {
    int block = -1, thread = 0;
    unsigned epoch = 0;
    bool atomic = false;
  };
  struct cell {
    who writer, reader;
    bool initialized;
    bool fresh = false; ///< written by the launch before
  };
  static constexpr std::size_t page = 256; // cells, which come to be when the first of them is accessed

  [[noreturn]] void fail(std::string const& what, std::uintptr_t at, std::size_t bytes, accessor const& by) const {
    throw violation{what + ": " + std::to_string(bytes) + " bytes at byte " + std::to_string(at - begin_) + " of " +
                    name_ + " by " + by.name()};
  }

  std::string name_;
  std::uintptr_t begin_;
  std::size_t bytes_, grain_;
  bool writable_, initialized_;
  std::vector<std::vector<cell>> pages_;
};

/// The memory of a device: the buffers that kernels may access.
class memory {
public:
  /// `count` numbers from `data` on. Not `initialized`: to read them before they are written is a violation.
  template <class T>
  void add(std::string name, T* data, std::size_t count, bool initialized = true) {
    if (count == 0) return;
    buffers_.emplace(reinterpret_cast<std::uintptr_t>(data),
                     buffer{std::move(name), data, count * sizeof(T), sizeof(T) > 8 ? 8 : sizeof(T),
                            !std::is_const_v<T>, initialized});
  }
  /// What is at addresses from `begin` to `end` is found `shift` bytes further.
  void find_at(std::uintptr_t begin, std::uintptr_t end, std::uintptr_t shift) {
    begin_ = begin, end_ = end, shift_ = shift;
  }
  template <class T>
  [[nodiscard]] T* place(T* data) const {
    auto const at = reinterpret_cast<std::uintptr_t>(data);
    return at >= begin_ && at < end_ ? reinterpret_cast<T*>(at + shift_) : data;
  }
  void clear() {
    buffers_.clear();
    latest_ = nullptr;
  }
  void settle() {
    for (auto& [begin, each] : buffers_) each.settle();
  }

  void check(void const* data, std::size_t bytes, access how, accessor const& by) {
    find(data, bytes, by).check(reinterpret_cast<std::uintptr_t>(data), bytes, how, by);
  }
  void check_place(void const* data, std::size_t bytes, accessor const& by) {
    find(data, bytes, by).check_place(reinterpret_cast<std::uintptr_t>(data), bytes, by);
  }

private:
  buffer& find(void const* data, std::size_t bytes, accessor const& by) {
    auto const at = reinterpret_cast<std::uintptr_t>(data);
    if (latest_ != nullptr && latest_->contains(at)) return *latest_;
    auto next = buffers_.upper_bound(at);
    if (next == buffers_.begin() || !std::prev(next)->second.contains(at)) {
      std::string near;
      if (next != buffers_.end())
        near = "; " + std::to_string(next->first - at) + " bytes before " + next->second.name();
      if (next != buffers_.begin())
        near += "; " + std::to_string(at - std::prev(next)->first) + " bytes from the start of " +
                std::prev(next)->second.name();
      throw violation{"out of bounds: " + std::to_string(bytes) + " bytes by " + by.name() + near};
    }
    return *(latest_ = &std::prev(next)->second);
  }

  std::map<std::uintptr_t, buffer> buffers_;
  buffer* latest_ = nullptr;
  std::uintptr_t begin_ = 0, end_ = 0, shift_ = 0;
};

} // namespace simt
