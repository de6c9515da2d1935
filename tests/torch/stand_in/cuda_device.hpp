#pragma once

#include <cstddef>

#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

/// A stand-in for libtorch's CUDA side, linked into tests where libtorch has none: tensors on devices of that name, in memory of the
/// stand-in for the CUDA runtime. Copies and fills are enqueued on the current stream; all other operations run on the host, after what
/// that stream has. It shows on which streams and devices, and in which memory, passes run, and nothing about a GPU.
namespace fake_torch {

inline constexpr int devices = 4;

/// The default stream of a device, which is current unless a `stream_scope` says otherwise.
cudaStream_t default_stream(int device);

/// Another stream, which lives until the end; an id for c10::Stream, and its handle.
c10::StreamId make_stream(int device);
cudaStream_t handle_of(c10::StreamId id, int device);

/// How often an operation ran on the host, which waits for the stream, since the last call.
int host_operations();

} // namespace fake_torch
