#include <simt/machine.hpp>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace {

struct cells {
  double of[64];
};

/// What a launch reports; nothing: empty.
template <class Kernel>
std::string report(simt::machine& on, simt::launch_shape const& shape, Kernel const& kernel) {
  try {
    on.launch(shape, kernel);
  } catch (simt::violation const& what) {
    return what.what();
  }
  return {};
}

void wait_for_cluster(simt::hardware const& hw) {
  hw.cluster_arrive(true);
  hw.cluster_wait();
}

bool begins(std::string const& text, char const* with) { return text.rfind(with, 0) == 0; }

} // namespace

TEST_CASE("Threads of all blocks run, and shared memory, shuffles, ballots and barriers work") {
  simt::machine on;
  std::vector<int> out(256);
  on.memory.add("out", out.data(), out.size());
  on.launch({4, 64}, [&](simt::hardware const& hw) {
    auto& shared = hw.shared<cells>();
    hw.store(&shared.of[hw.thread()], hw.thread());
    hw.barrier();
    auto const opposite = static_cast<int>(hw.load(&shared.of[63 - hw.thread()]));
    int const neighbour = hw.shuffle_xor(opposite, 1);
    unsigned const even = hw.ballot(~0u, opposite % 2 == 0);
    bool const any = hw.barrier_or(hw.thread() == 5 && hw.block() == 2);
    int const third = hw.shuffle(opposite, 3);
    int const value = neighbour + (even == 0xaaaaaaaau ? 1000 : 0) + (any ? 10000 : 0) + 100000 * third;
    hw.store(&out[hw.block() * 64 + static_cast<unsigned>(hw.thread())], value);
  });
  for (std::size_t i = 0; i < out.size(); ++i)
    CHECK(out[i] ==
          ((63 - static_cast<int>(i % 64)) ^ 1) + 1000 + (i / 64 == 2 ? 10000 : 0) + (i % 64 < 32 ? 6000000 : 2800000));
}

TEST_CASE("Lanes that a ballot does not name may go on") {
  simt::machine on;
  std::vector<unsigned> out(32);
  on.memory.add("out", out.data(), out.size());
  on.launch({1, 32}, [&](simt::hardware const& hw) {
    if (hw.thread() < 8) hw.store(&out[static_cast<std::size_t>(hw.thread())], hw.ballot(0xffu, hw.thread() > 2));
  });
  CHECK(out[0] == 0xf8u);
  CHECK(out[8] == 0);
}

TEST_CASE("A barrier that not all threads reach is reported") {
  simt::machine on;
  CHECK(begins(report(on, {1, 64},
                      [](simt::hardware const& hw) {
                        if (hw.thread() < 32) hw.barrier();
                      }),
               "barrier that threads do not reach"));
  CHECK(begins(report(on, {1, 64},
                      [](simt::hardware const& hw) {
                        if (hw.thread() < 32)
                          hw.barrier();
                        else
                          (void)hw.shuffle_xor(1, 1), hw.thread() == 40 ? hw.barrier() : (void)hw.shuffle_xor(1, 1);
                      }),
               "shuffle that lanes do not reach"));
}

TEST_CASE("Blocks of a cluster run beside each other, and read what the others have") {
  simt::machine on;
  std::vector<double> out(6);
  on.memory.add("out", out.data(), out.size());
  simt::launch_shape const shape{6, 32, 0, 5, 3};
  auto const pass_on = [&](bool first, bool second) {
    return report(on, shape, [&](simt::hardware const& hw) {
      auto& shared = hw.shared<cells>();
      if (hw.thread() == 0) hw.store(&shared.of[1], 10.0 + hw.block());
      if (first) wait_for_cluster(hw);
      if (hw.thread() == 0)
        hw.store(&out[hw.block()], hw.load_from(static_cast<int>((hw.block() + 1) % 3), &shared.of[1]));
      if (second) wait_for_cluster(hw);
      if (hw.thread() == 0) hw.store(&shared.of[1], 0.0);
    });
  };
  CHECK(pass_on(true, true).empty());
  CHECK(out == std::vector<double>{11, 12, 10, 14, 15, 13});
  CHECK(!pass_on(false, true).empty()); // of what was never written, or in a race
  CHECK(begins(pass_on(true, false), "race with a read"));
}

TEST_CASE("Who has arrived at a barrier of a cluster waits for it before it reads or arrives again") {
  simt::machine on;
  auto const with = [&](auto const& work) {
    return report(on, {2, 32, 0, 0, 2}, [&](simt::hardware const& hw) {
      auto& shared = hw.shared<cells>();
      if (hw.thread() == 0) hw.store(&shared.of[1], 1.0);
      wait_for_cluster(hw);
      if (hw.thread() == 0) work(hw, shared);
      hw.cluster_arrive(false);
      hw.cluster_wait();
    });
  };
  CHECK(with([](auto const& hw, auto& shared) { (void)hw.load_from(1, &shared.of[1]); }).empty());
  CHECK(begins(with([](auto const& hw, auto& shared) {
                 hw.cluster_arrive(false);
                 (void)hw.load_from(1, &shared.of[1]);
               }),
               "read of another block's memory after arrival"));
  CHECK(begins(with([](auto const& hw, auto&) { hw.cluster_arrive(false); }),
               "arrival at a barrier of a cluster without a wait"));
  CHECK(begins(report(on, {2, 64, 0, 0, 2},
                      [](simt::hardware const& hw) {
                        hw.cluster_arrive(hw.thread() == 0);
                        hw.cluster_wait();
                      }),
               "arrival at a barrier of a cluster by a warp of which some lanes publish"));
  CHECK(begins(with([](auto const& hw, auto&) { hw.cluster_wait(); }), "wait for a barrier of a cluster"));
}

TEST_CASE("A copy to shared memory is there once its thread has waited for it, and for no other before a barrier") {
  simt::machine on;
  alignas(16) std::array<float, 64> data{};
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  on.memory.add("data", data.data(), data.size());
  auto const with = [&](auto const& work) {
    return report(on, {1, 32, 128}, [&](simt::hardware const& hw) {
      if (hw.thread() < 2) work(hw, reinterpret_cast<float*>(hw.dynamic_shared()));
    });
  };
  std::array<float, 4> got{};
  CHECK(with([&](auto const& hw, float* room) {
          hw.template copy<16>(room + 4 * hw.thread(), &data[8]);
          hw.wait_for_copies();
          auto const some = hw.load_pack(static_cast<float const*>(room + 4 * hw.thread()), {});
          for (int e = 0; e < 4; ++e) got[static_cast<std::size_t>(e)] = some[e];
        }).empty());
  CHECK(got == std::array<float, 4>{8, 9, 10, 11});
  CHECK(begins(with([&](auto const& hw, float* room) {
                 hw.template copy<16>(room + 4 * hw.thread(), &data[0]);
                 (void)hw.load(room + 4 * hw.thread());
               }),
               "access to what a copy has not put there yet"));
  CHECK(begins(with([&](auto const& hw, float* room) { hw.template copy<16>(room + 4 * hw.thread(), &data[0]); }),
               "copies that thread 0 does not wait for"));
  CHECK(begins(with([&](auto const& hw, float* room) {
                 if (hw.thread() == 0) {
                   hw.template copy<16>(room, &data[0]);
                   hw.wait_for_copies();
                 } else {
                   (void)hw.load(room);
                 }
               }),
               "race with a write"));
  CHECK(begins(with([&](auto const& hw, float* room) {
                 hw.template copy<8>(room + 4 * hw.thread(), &data[57]);
                 hw.wait_for_copies();
               }),
               "misaligned access"));
}

TEST_CASE("Copies come by groups, of which the latest ones may be waited for later") {
  simt::machine on;
  alignas(16) std::array<float, 64> data{};
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  on.memory.add("data", data.data(), data.size());
  auto const of_groups = [&](bool commits, int which) {
    float got = -1;
    auto const said = report(on, {1, 32, 32}, [&](simt::hardware const& hw) {
      if (hw.thread() != 0) return;
      auto* const room = reinterpret_cast<float*>(hw.dynamic_shared());
      for (int group = 0; group < 2; ++group) {
        hw.copy<16>(room + 4 * group, &data[static_cast<std::size_t>(8 + 4 * group)]);
        if (commits) hw.commit_copies();
      }
      hw.wait_for_copies_but<1>();
      got = hw.load(room + 4 * which);
      hw.wait_for_copies();
    });
    return said.empty() ? std::to_string(static_cast<int>(got)) : said;
  };
  CHECK(of_groups(true, 0) == "8");
  CHECK(begins(of_groups(true, 1), "access to what a copy has not put there yet"));
  CHECK(begins(of_groups(false, 0), "access to what a copy has not put there yet")); // a group that has not ended
}

TEST_CASE("A launch that is early waits for the one before where it reads what that wrote, writes, or ends") {
  simt::machine on;
  std::array<float, 64> input{}, made{};
  on.memory.add("input", input.data(), input.size());
  on.memory.add("made", made.data(), made.size());
  auto const after = [&](bool early, auto const& work) {
    on.launch({1, 32}, [&](simt::hardware const& hw) { hw.store(&made[static_cast<std::size_t>(hw.thread())], 1); });
    simt::launch_shape shape{1, 32};
    shape.early = early;
    return report(on, shape, [&](simt::hardware const& hw) { work(hw, static_cast<std::size_t>(hw.thread())); });
  };
  auto const reads = [&](auto const& hw, std::size_t t) {
    (void)hw.load(&made[t]);
    hw.wait_for_previous();
  };
  CHECK(begins(after(true, reads), "read of what the launch before may not have written yet"));
  CHECK(after(false, reads).empty());
  CHECK(begins(after(true, [&](auto const& hw, std::size_t t) { hw.store(&input[t], 1); }),
               "write before the launch before has ended"));
  CHECK(begins(after(true, [&](auto const& hw, std::size_t t) { (void)hw.load(&input[t]); }),
               "end of thread 0, which has not waited"));
  CHECK(after(true, [&](auto const& hw, std::size_t t) {
          (void)hw.load(&input[t]);
          (void)hw.load(&made[32 + t]); // of which the launch before wrote nothing
          hw.wait_for_previous();
          hw.store(&input[t], hw.load(&made[t]));
        }).empty());
}

TEST_CASE("A barrier of a cluster that not all threads reach is reported") {
  simt::machine on;
  auto const without = [&](auto const& leaves) {
    return report(on, {4, 32, 0, 0, 2}, [&](simt::hardware const& hw) {
      if (!leaves(hw)) wait_for_cluster(hw);
    });
  };
  CHECK(without([](auto const&) { return false; }).empty());
  CHECK(begins(without([](auto const& hw) { return hw.block() == 3; }),
               "barrier of a cluster that threads do not reach"));
  CHECK(begins(without([](auto const& hw) { return hw.thread() == 7; }),
               "barrier of a cluster that threads do not reach"));
  CHECK(begins(report(on, {3, 32, 0, 0, 2}, [](simt::hardware const&) {}), "blocks are no multiple"));
}

TEST_CASE("A shuffle or ballot whose lanes do not all arrive is reported") {
  simt::machine on;
  CHECK(begins(report(on, {1, 32},
                      [](simt::hardware const& hw) {
                        if (hw.thread() < 31) (void)hw.shuffle_xor(1, 1);
                      }),
               "shuffle that lanes do not reach"));
  CHECK(begins(report(on, {1, 32},
                      [](simt::hardware const& hw) {
                        if (hw.thread() < 7) (void)hw.ballot(0xff, true);
                      }),
               "ballot that lanes do not reach"));
  CHECK(begins(report(on, {1, 32}, [](simt::hardware const& hw) { (void)hw.ballot(0xff, true); }),
               "ballot by a lane that it does not name"));
  CHECK(begins(report(on, {1, 32},
                      [](simt::hardware const& hw) {
                        if (hw.thread() < 16)
                          (void)hw.ballot(0xffff, true);
                        else
                          (void)hw.shuffle_xor(1, 1);
                      }),
               "shuffle that lanes do not reach"));
}

TEST_CASE("An access out of bounds, to read-only memory or misaligned is reported") {
  simt::machine on;
  std::array<float, 64> data{};
  std::array<float, 8> const input{};
  on.memory.add("data", data.data() + 4, 16);
  on.memory.add("input", input.data(), input.size());
  auto const at = [&](auto const& work) {
    return report(on, {1, 32}, [&](simt::hardware const& hw) {
      if (hw.thread() == 3) work(hw);
    });
  };
  CHECK(begins(at([&](auto const& hw) { (void)hw.load(&data[20]); }), "out of bounds"));
  CHECK(begins(at([&](auto const& hw) { (void)hw.load(&data[3]); }), "out of bounds"));
  CHECK(begins(
      at([&](auto const& hw) { (void)hw.load(reinterpret_cast<float*>(reinterpret_cast<char*>(&data[5]) + 2)); }),
      "misaligned access"));
  std::size_t off = 4;
  while (syncnorm::cuda::detail::is_aligned(&data[off])) ++off;
  CHECK(begins(at([&](auto const& hw) { (void)hw.load_pack(&data[off], {}); }), "misaligned access"));
  CHECK(begins(at([&](auto const& hw) { hw.store_pack(&data[off], syncnorm::cuda::detail::pack<float>{}, {}); }),
               "misaligned access"));
  CHECK(begins(at([&](auto const& hw) { hw.store(const_cast<float*>(&input[0]), 1.0f); }),
               "write to what is read alone"));
  CHECK(begins(at([&](auto const& hw) { (void)hw.load(hw.template shared<cells>().of + 64); }), "out of bounds"));
  CHECK(at([&](auto const& hw) { (void)hw.load(&data[19]); }).empty());
}

TEST_CASE("A load of a part of a pack has to be aligned and of one buffer, and reads that part alone") {
  simt::machine on;
  alignas(16) std::array<float, 64> data{};
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  on.memory.add("data", data.data() + 2, 60);
  auto const at = [&](std::size_t first, syncnorm::cuda::detail::extent_of_pack const& part,
                      std::array<float, 4>& got) {
    return report(on, {1, 32}, [&](simt::hardware const& hw) {
      if (hw.thread() == 2) hw.store(&data[9], 9.0f);
      if (hw.thread() != 3) return;
      auto const some = hw.load_part(&data[first], part, {});
      for (int e = 0; e < 4; ++e) got[static_cast<std::size_t>(e)] = some[e];
    });
  };
  std::array<float, 4> got{};
  CHECK(begins(at(0, {2, 4}, got), "out of bounds"));
  CHECK(begins(at(60, {0, 2}, got), "out of bounds"));
  CHECK(begins(at(17, {1, 3}, got), "misaligned access"));
  CHECK(begins(at(8, {1, 3}, got), "race with a write"));
  CHECK(at(8, {2, 4}, got).empty());
  CHECK((got[2] == 10 && got[3] == 11));
  std::uint32_t bits = 0;
  std::memcpy(&bits, &got[1], sizeof bits);
  CHECK(bits == 0xa5a5a5a5u);
}

TEST_CASE("A read of shared memory that was never written is reported") {
  simt::machine on;
  CHECK(
      begins(report(on, {1, 32}, [](simt::hardware const& hw) { (void)hw.load(&hw.shared<cells>().of[hw.thread()]); }),
             "read of what was never written"));
}

TEST_CASE("A race in shared memory is reported, and a barrier prevents it") {
  simt::machine on;
  auto const neighbours = [&](bool before, bool after) {
    return report(on, {1, 64}, [=](simt::hardware const& hw) {
      auto& shared = hw.shared<cells>();
      hw.store(&shared.of[hw.thread()], 1.0);
      hw.barrier();
      double const other = hw.load(&shared.of[(hw.thread() + 1) % 64]);
      if (after) hw.barrier();
      hw.store(&shared.of[hw.thread()], other);
      if (before) hw.barrier();
      (void)hw.load(&shared.of[(hw.thread() + 1) % 64]);
    });
  };
  CHECK(neighbours(true, true).empty());
  CHECK(begins(neighbours(false, true), "race with a read"));
  CHECK(begins(neighbours(true, false), "race with a read"));
}

TEST_CASE("A race in global memory is reported, between threads and between blocks") {
  simt::machine on;
  std::array<std::uint32_t, 64> data{};
  on.memory.add("data", data.data(), data.size());
  CHECK(begins(report(on, {1, 32},
                      [&](simt::hardware const& hw) { hw.store(&data[0], static_cast<std::uint32_t>(hw.thread())); }),
               "race with a write"));
  CHECK(begins(report(on, {2, 32},
                      [&](simt::hardware const& hw) {
                        if (hw.thread() == 0) hw.store(&data[0], 1u);
                      }),
               "race with a write"));
  CHECK(begins(report(on, {2, 32},
                      [&](simt::hardware const& hw) {
                        if (hw.thread() != 0) return;
                        if (hw.block() == 0)
                          (void)hw.load(&data[1]);
                        else
                          hw.store(&data[1], 1u);
                      }),
               "race with a read"));
  CHECK(begins(report(on, {2, 32},
                      [&](simt::hardware const& hw) {
                        if (hw.thread() != 0) return;
                        if (hw.block() == 0)
                          hw.store(&data[1], 1u);
                        else
                          (void)hw.atomic_increment(&data[1], 3);
                      }),
               "race with a write"));
  CHECK(report(on, {2, 32}, [&](simt::hardware const& hw) { (void)hw.atomic_increment(&data[0], 3); }).empty());
}

TEST_CASE("The last block to arrive may read what others wrote, after barrier and atomic, in any order") {
  simt::machine on;
  std::array<double, 128> parts{};
  unsigned ticket = 0;
  double sum = 0;
  on.memory.add("parts", parts.data(), parts.size());
  on.memory.add("ticket", &ticket, 1);
  on.memory.add("sum", &sum, 1);
  auto const last = [&](unsigned order, bool ticketed, bool barriers) {
    int arrived = 0;
    return report(on, {4, 32, 0, order}, [&, ticketed, barriers](simt::hardware const& hw) {
      hw.store(&parts[hw.block() * 32 + static_cast<unsigned>(hw.thread())], 1.0);
      if (barriers) hw.barrier();
      bool done = false;
      if (hw.thread() == 0) done = ticketed ? hw.atomic_increment(&ticket, 3u) == 3 : ++arrived == 4;
      if (!hw.barrier_or(done) || hw.thread() != 1) return;
      double all = 0;
      for (auto const& each : parts) all += hw.load(&each);
      hw.store(&sum, all);
    });
  };
  for (unsigned const order : {0u, 1u, 2u, 3u}) {
    CHECK(last(order, true, true).empty());
    CHECK(sum == 128);
    CHECK(ticket == 0); // for the next launch
    CHECK(begins(last(order, false, true), "race with a write"));
    CHECK(begins(last(order, true, false), "race with a write"));
  }
}
