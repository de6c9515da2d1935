#pragma once

#include <vector>

#include <nccl.h>

/// A stand-in for NCCL over `fake_cuda`, linked into tests in its place. Ranks are communicators of one process, and a
/// collective is work of its stream that waits there for the others, as a kernel of NCCL's does.
namespace fake_nccl {

/// The communicators of a group of `size` ranks.
std::vector<ncclComm_t> make_group(int size);

/// Lets ncclCommGetAsyncError of `comm` give `code`.
void set_async_error(ncclComm_t comm, ncclResult_t code);

/// Makes `comm` one that does not block: a collective is in progress until it was asked for so many times.
void set_in_progress(ncclComm_t comm, int polls);

/// Communicators that were made and neither destroyed nor aborted.
int alive();

} // namespace fake_nccl
