#include "communicators.hpp"

#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/error.hpp>

#if TRAIN_CIFAR_HAVE_GLOO
#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>
#endif
#if TRAIN_CIFAR_HAVE_MPI
#include <syncnorm/adapters/mpi.hpp>
#endif

namespace train_cifar {

namespace {

using member_body = std::function<void(syncnorm::any_communicator const&)>;

#if TRAIN_CIFAR_HAVE_GLOO
void run_over_gloo(membership const& member, options const& opts, member_body const& body) {
  auto const store = syncnorm::make_gloo_store(opts.rendezvous);
  auto context = syncnorm::make_gloo_context(
      member.rank, member.ranks, *store, {.interface = opts.interface, .timeout = opts.timeout, .prefix = opts.prefix});
  body(syncnorm::gloo_communicator{std::move(context), opts.timeout});
}
#else
void run_over_gloo(membership const&, options const&, member_body const&) {
  throw syncnorm::error{"this train_cifar was built without Gloo, over which its ranks meet"};
}
#endif

#if TRAIN_CIFAR_HAVE_MPI
void run_over_mpi(membership const& member, options const& opts, member_body const& body) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  try {
    // libtorch runs backward passes of CUDA tensors on a thread of its own.
    if (provided < MPI_THREAD_SERIALIZED) throw syncnorm::error{"this MPI lets one thread alone call it"};
    syncnorm::mpi_communicator const comm{MPI_COMM_WORLD, opts.timeout};
    if (comm.rank() != member.rank || comm.size() != member.ranks)
      throw syncnorm::error{"this is rank " + std::to_string(comm.rank()) + " of " + std::to_string(comm.size()) +
                            " over MPI, but the environment says " + std::to_string(member.rank) + " of " +
                            std::to_string(member.ranks) + ": was it started by another MPI's mpirun?"};
    body(comm);
  } catch (std::exception const& failure) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::fprintf(stderr, "train_cifar: rank %d: %s\n", rank, failure.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
#else
void run_over_mpi(membership const&, options const&, member_body const&) {
  throw syncnorm::error{"this train_cifar was built without MPI"};
}
#endif

} // namespace

void run_as_member(membership const& member, options const& opts, member_body const& body) {
  switch (member.kind) {
  case membership_kind::threads:
    return syncnorm::run_ranks(
        member.ranks, [&](syncnorm::thread_communicator const& comm) { body(comm); }, opts.timeout);
  case membership_kind::gloo:
    return run_over_gloo(member, opts, body);
  case membership_kind::mpi:
    return run_over_mpi(member, opts, body);
  case membership_kind::alone:
  case membership_kind::starter:
    break;
  }
  body(syncnorm::self_communicator{});
}

} // namespace train_cifar
