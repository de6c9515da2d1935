// batch_norm over Gloo, beside the same work without exchange, Gloo's own collectives and the homework's algorithm.
// Started once per rank: --rank R --ranks P --meet DIRECTORY [--host ADDRESS] [--wire NAME].

#include <cstddef>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gloo/allgather.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>

#include "support/harness.hpp"
#include "support/peers.hpp"
#include "support/rank_rows.hpp"

namespace {

struct place {
  int rank, ranks;
  std::string meet, host, wire;
};

place read_place(bench::settings const& how) {
  auto const option = [&](std::string const& name, std::string const& otherwise) {
    auto const at = how.others.find(name);
    return at == how.others.end() ? otherwise : at->second;
  };
  return {bench::whole_number("--rank", option("rank", "0"), 0), bench::whole_number("--ranks", option("ranks", "1")),
          option("meet", "."), option("host", "127.0.0.1"), option("wire", "")};
}

/// A context as Gloo's own users make it.
std::shared_ptr<gloo::Context> make_plain_context(place const& where) {
  auto const path = where.meet + "/plain";
  std::filesystem::create_directories(path);
  gloo::rendezvous::FileStore store{path};
  gloo::transport::tcp::attr attributes;
  attributes.hostname = where.host;
  auto device = gloo::transport::tcp::CreateDevice(attributes);
  auto context = std::make_shared<gloo::rendezvous::Context>(where.rank, where.ranks);
  context->connectFullMesh(store, device);
  return context;
}

/// The exchanges of two passes by gloo::allgather.
bench::contender bare_collectives(std::shared_ptr<gloo::Context> const& context, std::size_t bytes) {
  return {"collectives", [context, bytes, ranks = static_cast<std::size_t>(context->size)] {
            return [context, in = std::vector<std::byte>(bytes),
                    out = std::vector<std::byte>(bytes * ranks)](int) mutable {
              for (int pass = 0; pass < 2; ++pass) {
                gloo::AllgatherOptions options{context};
                options.setInput(reinterpret_cast<char*>(in.data()), in.size());
                options.setOutput(reinterpret_cast<char*>(out.data()), out.size());
                options.setTag(static_cast<std::uint32_t>(context->nextSlot()));
                gloo::allgather(options);
              }
            };
          }};
}

#if SYNCNORM_BENCH_HOMEWORK
bench::contender homework_contender(std::shared_ptr<bench::homework> const& homework, bench::row_key const& key) {
  return {"homework", [homework, key] {
            auto const data = bench::make_tensors<float>(key);
            auto const step =
                homework->step(data->front().x.data(), data->front().dy.data(), key.shape[0], key.shape[1]);
            return [data, step](int) { step(); };
          }};
}
#endif

int measure(bench::settings const& how) {
  auto const where = read_place(how);
  auto const store = syncnorm::make_gloo_store("file:" + where.meet + "/syncnorm");
  auto const context = syncnorm::make_gloo_context(where.rank, where.ranks, *store, {.hostname = where.host});
  syncnorm::gloo_communicator const comm{context}, control{context};
  std::shared_ptr<gloo::Context> plain;
  if (where.wire.empty() && where.ranks > 1) plain = make_plain_context(where);
#if SYNCNORM_BENCH_HOMEWORK
  // Not across a slow wire, where only this library's time is of interest.
  std::shared_ptr<bench::homework> homework;
  if (where.wire.empty() && where.ranks > 1)
    homework = std::make_shared<bench::homework>(where.rank, where.ranks, where.meet + "/homework");
#endif
  control.barrier(); // where the filter leaves a rank nothing to do, it ends, while others may still connect to it
  auto const comm_of = [comm](int) { return comm; };
  bench::rank_source<decltype(comm_of)> source{
      .name = "gloo" + where.wire,
      .ranks = where.ranks,
      .comm_of = comm_of,
      .steps = where.ranks <= 2 && !how.quick ? 200 : 50,
      .more =
          [&]([[maybe_unused]] bench::row_key const& key, std::size_t bytes) {
            std::vector<bench::contender> more;
            if (plain) more.push_back(bare_collectives(plain, bytes));
#if SYNCNORM_BENCH_HOMEWORK
            if (homework) more.push_back(homework_contender(homework, key));
#endif
            return more;
          },
  };
  std::vector<bench::row> rows;
  if (!where.wire.empty()) {
    bench::add_large_rows(rows, how, source);
  } else {
    if (where.ranks == 2) {
      bench::add_large_rows(rows, how, source);
      bench::add_grid_rows(rows, how, source);
    }
    if (where.ranks > 1 && !how.quick) bench::add_policy_rows(rows, how, source);
    bench::add_scaling_row(rows, source);
  }
  bench::process_group const group{
      .rank = where.rank,
      .barrier = [&] { control.barrier(); },
      .mean =
          [&](double seconds) {
            syncnorm::allreduce(control, std::span<double const>{&seconds, 1}, std::span{&seconds, 1});
            return seconds / where.ranks;
          },
  };
  return bench::run(how, rows, group);
}

} // namespace

int main(int argc, char** argv) {
  try {
    return measure(bench::parse(argc, argv, {"rank", "ranks", "meet", "host", "wire"}));
  } catch (std::exception const& error) {
    std::cerr << "bench.gloo: " << error.what() << '\n';
    return 1;
  }
}
