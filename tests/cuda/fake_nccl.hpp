#pragma once

#include <chrono>
#include <vector>

#include <nccl.h>

/// A stand-in for NCCL over `fake_cuda`, linked into tests in its place. Ranks are communicators of one process, and a
/// collective is work of its stream that waits there for the others, as a kernel of NCCL's does. Neither ncclCommDestroy nor
/// ncclCommAbort returns before the graphs are destroyed that hold a collective of the communicator. Where a communicator does not
/// block, ncclCommSplit writes what it was given a place for when it is done, or when the communicator is freed: that this place is on
/// the stack of the caller is noted.
namespace fake_nccl {

/// The communicators of a group of `size` ranks.
std::vector<ncclComm_t> make_group(int size);

/// Lets ncclCommGetAsyncError of `comm` give `code`.
void set_async_error(ncclComm_t comm, ncclResult_t code);

/// Makes `comm` one that does not block: a collective is in progress until it was asked for so many times.
void set_in_progress(ncclComm_t comm, int polls);

/// Makes `comm` one that does not block and is still being made, until it was asked for so many times. Its rank and its size are
/// then invalid arguments.
void set_being_made(ncclComm_t comm, int polls);

/// Lets the ranks of `comm` connect in the first collective of a kind and size, as each of them has to be told: until all have
/// called it, it is in progress, and of a communicator that `blocks`, the call waits for that. One in a capture is noted.
void set_connecting_lazily(ncclComm_t comm, bool blocks);

/// Lets ncclCommGetAsyncError of `comm` take so long. That it is freed meanwhile is noted.
void set_slow_polls(ncclComm_t comm, std::chrono::milliseconds time);

/// Communicators that were made and neither destroyed nor aborted.
int alive();

} // namespace fake_nccl
