#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/address.h>

namespace syncnorm::detail {

/// A Gloo context whose addresses the caller carries between the ranks, and which waits as long as it is told to:
/// Gloo's own rendezvous waits 30 s for some of its keys and five times the context's timeout for a connection.
class gloo_mesh final : public gloo::Context {
public:
  gloo_mesh(int own_rank, int ranks, std::shared_ptr<gloo::transport::Device> device, std::chrono::milliseconds timeout)
      : gloo::Context{own_rank, ranks} {
    setTimeout(timeout);
    if (ranks == 1) return;
    device_ = std::move(device);
    transportContext_ = device_->createContext(own_rank, ranks);
    transportContext_->setTimeout(std::max(std::chrono::milliseconds{1}, timeout / 5));
    for (int r = 0; r < ranks; ++r)
      if (r != own_rank) transportContext_->createPair(r);
  }

  /// Where rank `peer` connects to.
  [[nodiscard]] std::vector<char> address_for(int peer) { return getPair(peer)->address().bytes(); }

  /// Connects to the address that rank `peer` has for this rank. Blocks until the peer does the same.
  void connect(int peer, std::vector<char> const& address) { getPair(peer)->connect(address); }
};

} // namespace syncnorm::detail
