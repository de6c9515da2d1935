#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/convert.hpp>

using namespace test;
using syncnorm::torch::convert_sync_batchnorm;
using syncnorm::torch::revert_sync_batchnorm;

namespace {

namespace nn = torch::nn;

/// A block as users write them: a sequence, a list and a dictionary.
struct NetImpl : nn::Module {
  NetImpl() {
    body->push_back("conv", nn::Conv2d{nn::Conv2dOptions(2, 3, 1)});
    body->push_back("bn", nn::BatchNorm2d{BatchNormOptions{3}.momentum(0.25)});
    body->push_back("relu", nn::ReLU{});
    body->push_back("frozen", nn::BatchNorm2d{3});
    heads->push_back(nn::BatchNorm1d{BatchNormOptions{3}.affine(false)});
    heads->push_back(nn::Linear{3, 3});
    extras->update(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
        {"volume", nn::BatchNorm3d{BatchNormOptions{3}.track_running_stats(false)}.ptr()},
        {"fc", nn::Linear{3, 2}.ptr()}});
    register_module("body", body);
    register_module("heads", heads);
    register_module("extras", extras);
  }

  Tensor forward(Tensor const& x) { return body->forward(x).mean({2, 3}); }

  nn::Sequential body;
  nn::ModuleList heads;
  nn::ModuleDict extras;
};
TORCH_MODULE(Net);

/// Holds its batch norm by its type, which leaves no room for another.
struct TypedImpl : nn::Module {
  TypedImpl() {
    register_module("bn", bn);
    register_module("inner", inner);
  }
  Tensor forward(Tensor const& x) { return inner->forward(bn->forward(x)); }
  nn::BatchNorm2d bn{3};
  nn::Sequential inner{nn::BatchNorm1d{2}};
};
TORCH_MODULE(Typed);

struct SyncTypedImpl : nn::Module {
  SyncTypedImpl() { register_module("bn", bn); }
  Tensor forward(Tensor const& x) { return bn->forward(x); }
  SyncBatchNorm bn{BatchNormOptions{3}};
};
TORCH_MODULE(SyncTyped);

nn::BatchNorm2dImpl& local(Net const& net, std::size_t i) { return *net->body->ptr(i)->as<nn::BatchNorm2d>(); }

/// A model with one batch norm that is frozen and in evaluation mode.
Net make_net(std::uint64_t seed) {
  torch::manual_seed(seed);
  Net net;
  local(net, 3).weight.set_requires_grad(false);
  local(net, 3).eval();
  return net;
}

void set_state(nn::Module const& module, std::vector<Tensor> const& state) {
  torch::NoGradGuard const no_recording;
  auto next = state.begin();
  for (auto& tensor : module.parameters()) tensor.copy_(*next++);
  for (auto& tensor : module.buffers()) tensor.copy_(*next++);
}

void train_step(Net net, Tensor const& x, Tensor const& dy) {
  net->forward(x).backward(dy);
  torch::optim::SGD{net->body->parameters(), 0.1}.step();
}

std::vector<std::string> kinds_of(nn::Module const& module) {
  std::vector<std::string> kinds;
  for (auto const& each : module.named_modules()) kinds.push_back(each.key() + " " + each.value()->name());
  return kinds;
}

std::vector<void*> addresses_of(nn::Module const& module) {
  std::vector<void*> addresses;
  for (auto const& tensor : module.parameters()) addresses.push_back(tensor.unsafeGetTensorImpl());
  for (auto const& tensor : module.buffers()) addresses.push_back(tensor.unsafeGetTensorImpl());
  return addresses;
}

} // namespace

TEST_CASE("a converted model is the same model over the ranks, and reverting restores it") {
  torch::manual_seed(21);
  auto const x = torch::randn({6, 2, 3, 3}), dy = torch::randn({6, 3});
  Net whole = make_net(0);
  whole->body->forward(x); // so that the statistics are not those of a new model
  auto const initial = state_of(*whole);
  train_step(whole, x, dy);

  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    Net net = make_net(1);
    set_state(*net, initial);
    auto const kinds = kinds_of(*net);
    auto const addresses = addresses_of(*net);
    auto const keys = net->named_parameters().keys();
    torch::optim::SGD optimizer{net->body->parameters(), 0.1};

    CHECK(convert_sync_batchnorm(net.ptr(), comm) == net.ptr());
    CHECK(addresses_of(*net) == addresses);
    CHECK(net->named_parameters().keys() == keys);
    std::size_t converted = 0;
    for (auto const& module : net->modules())
      if (auto const* norm = module->as<SyncBatchNormImpl>()) {
        ++converted;
        CHECK(syncnorm::size(norm->communicator()) == 2);
      }
    CHECK(converted == 4);
    for (auto const& module : net->modules()) CHECK_FALSE(syncnorm::torch::detail::is_batch_norm(*module));
    auto& norm = net->body->at<SyncBatchNormImpl>(1);
    CHECK(norm.options.momentum() == 0.25);
    CHECK(norm.is_training());
    CHECK_FALSE(net->body->at<SyncBatchNormImpl>(3).is_training());
    CHECK_FALSE(net->body->at<SyncBatchNormImpl>(3).weight.requires_grad());
    CHECK_FALSE(net->heads->at<SyncBatchNormImpl>(0).weight.defined());
    CHECK((*net->extras)["volume"]->as<SyncBatchNormImpl>()->revert_dimension() == 3);

    // A step of the optimizer that was made before: gradients add up to those of the whole batch.
    auto const part = [&](Tensor const& t) { return comm.rank() == 0 ? t.slice(0, 0, 4) : t.slice(0, 4, 6); };
    net->forward(part(x)).backward(part(dy));
    for (auto const& parameter : net->body->parameters()) {
      if (!parameter.grad().defined()) continue;
      auto& grad = parameter.grad();
      std::span<float> const values{grad.data_ptr<float>(), static_cast<std::size_t>(grad.numel())};
      syncnorm::allreduce(comm, std::span<float const>{values}, values);
    }
    optimizer.step();
    auto const expected = whole->body->parameters(), got = net->body->parameters();
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(error_of(got[i], expected[i], 1) <= 1e-5);
    CHECK(error_of(norm.running_var, local(whole, 1).running_var) <= 1e-5);

    // Reverted: the same types, the same tensors; and a reverted model computes, and converts again.
    auto const trained = state_of(*net);
    CHECK(revert_sync_batchnorm(net.ptr()) == net.ptr());
    CHECK(kinds_of(*net) == kinds);
    CHECK(addresses_of(*net) == addresses);
    CHECK(same_state(state_of(*net), trained));
    CHECK_FALSE(local(net, 3).is_training());
    CHECK(local(net, 1).options.momentum() == 0.25);
    net->eval();
    auto const y = net->forward(x);
    convert_sync_batchnorm(net.ptr(), comm);
    CHECK(error_of(net->forward(x), y) <= 1e-5);
  });
}

TEST_CASE("a batch norm itself is returned converted and reverted") {
  nn::BatchNorm3d original{2};
  original->to(torch::kDouble);
  auto const addresses = addresses_of(*original);
  auto const converted = convert_sync_batchnorm(original.ptr(), syncnorm::self_communicator{});
  REQUIRE(converted->as<SyncBatchNorm>() != nullptr);
  CHECK((addresses_of(*converted) == addresses));
  CHECK(converted->as<SyncBatchNorm>()->weight.is_same(original->weight));
  CHECK(converted->as<SyncBatchNorm>()->running_var.is_same(original->running_var));
  auto const reverted = revert_sync_batchnorm(converted);
  REQUIRE(reverted->as<nn::BatchNorm3d>() != nullptr);
  CHECK(addresses_of(*reverted) == addresses);

  // Made directly, a module becomes a BatchNorm2d unless it says otherwise.
  CHECK(revert_sync_batchnorm(SyncBatchNorm{2}.ptr())->as<nn::BatchNorm2d>() != nullptr);
  SyncBatchNorm const one{BatchNormOptions{2}, syncnorm::self_communicator{}, 1};
  CHECK(revert_sync_batchnorm(one.ptr())->as<nn::BatchNorm1d>() != nullptr);
}

TEST_CASE("a model is converted and reverted as what holds it") {
  syncnorm::self_communicator const comm;
  nn::Sequential sequence{nn::BatchNorm2d{3}};
  sequence = convert_sync_batchnorm(sequence, comm);
  CHECK(sequence->ptr(0)->as<SyncBatchNorm>() != nullptr);
  sequence = revert_sync_batchnorm(sequence);
  CHECK(sequence->ptr(0)->as<nn::BatchNorm2d>() != nullptr);
  Net net;
  net = convert_sync_batchnorm(net, comm);
  CHECK(net->body->ptr(1)->as<SyncBatchNorm>() != nullptr);
  net = revert_sync_batchnorm(net);
  CHECK(net->body->ptr(1)->as<nn::BatchNorm2d>() != nullptr);
  auto shared = std::make_shared<NetImpl>();
  shared = convert_sync_batchnorm(shared, comm);
  CHECK(shared->body->ptr(1)->as<SyncBatchNorm>() != nullptr);
  shared = revert_sync_batchnorm(shared);
  std::shared_ptr<nn::Module> any = shared;
  any = convert_sync_batchnorm(any, comm);
  CHECK(any == shared);
  SyncBatchNorm norm{2};
  CHECK(convert_sync_batchnorm(norm, comm).ptr() == norm.ptr());

  // Whose type does not say that it is a batch norm.
  std::shared_ptr<nn::Cloneable<nn::BatchNorm2dImpl>> const hidden = nn::BatchNorm2d{2}.ptr();
  auto const text = message_of<syncnorm::invalid_argument_error>([&] { convert_sync_batchnorm(hidden, comm); });
  CHECK_MESSAGE(contains(text, "convert_sync_batchnorm: the module itself would be replaced"), text);
  CHECK_THROWS_AS(convert_sync_batchnorm(nn::Sequential{nullptr}, comm), syncnorm::invalid_argument_error);
  CHECK_THROWS_AS(revert_sync_batchnorm(nn::Sequential{nullptr}), syncnorm::invalid_argument_error);
}

TEST_CASE("what cannot be replaced is named before anything has changed") {
  nn::Sequential model{Typed{}, nn::BatchNorm2d{3}, Typed{}};
  auto const kinds = kinds_of(*model);
  auto const text = message_of<syncnorm::invalid_argument_error>(
      [&] { convert_sync_batchnorm(model.ptr(), syncnorm::self_communicator{}); });
  CHECK_MESSAGE(contains(text, "cannot replace 0.bn, 2.bn: "), text);
  CHECK(kinds_of(*model) == kinds);
}

namespace {

/// Has its batch norm among its elements, and registers it as a member besides.
template <class Container>
struct Derived : Container {
  nn::BatchNorm2d bn{3};
  Derived() {
    if constexpr (std::is_same_v<Container, nn::SequentialImpl>)
      this->push_back(bn);
    else
      this->push_back(bn.ptr());
    this->register_module("bn", bn);
  }
};

} // namespace

TEST_CASE("an element of a container that is a member of a class derived from it, too, cannot be replaced") {
  auto const check = [](std::shared_ptr<nn::Module> const& model) {
    auto const kinds = kinds_of(*model);
    auto const text = message_of<syncnorm::invalid_argument_error>(
        [&] { convert_sync_batchnorm(model, syncnorm::self_communicator{}); });
    CHECK_MESSAGE(contains(text, "cannot replace 0, bn: "), text);
    CHECK(kinds_of(*model) == kinds);
  };
  check(std::make_shared<Derived<nn::SequentialImpl>>());
  check(std::make_shared<Derived<nn::ModuleListImpl>>());
}

TEST_CASE("what a batch norm has registered stays with it") {
  nn::BatchNorm2d const norm{3};
  norm.ptr()->register_module("child", nn::Linear{2, 2});
  nn::Sequential model{norm};
  CHECK(model->parameters().size() == 4);
  convert_sync_batchnorm(model.ptr(), syncnorm::self_communicator{});
  CHECK((model->ptr(0)->as<SyncBatchNorm>() != nullptr && model->parameters().size() == 4));
  revert_sync_batchnorm(model.ptr());
  CHECK((model->ptr(0)->as<nn::BatchNorm2d>() != nullptr && model->parameters().size() == 4));
}

TEST_CASE("what a BatchNorm could not do is not reverted") {
  nn::Sequential model{SyncBatchNorm{3}, SyncBatchNorm{3}};
  auto const kinds = kinds_of(*model);
  auto& norm = *model->ptr(1)->as<SyncBatchNorm>();
  norm.freeze_statistics();
  auto text = message_of<syncnorm::invalid_argument_error>([&] { revert_sync_batchnorm(model); });
  CHECK_MESSAGE(contains(text, "has frozen statistics"), text);
  norm.freeze_statistics(false);
  for (auto const kind : {syncnorm::running_variance::standard_deviation, syncnorm::running_variance::biased}) {
    norm.set_running_variance(kind);
    text = message_of<syncnorm::invalid_argument_error>([&] { revert_sync_batchnorm(model); });
    CHECK_MESSAGE(contains(text, "keeps biased running variances, or running standard deviations"), text);
  }
  norm.set_running_variance(syncnorm::running_variance::unbiased);
  norm.set_batch_variance(syncnorm::batch_variance::unbiased);
  text = message_of<syncnorm::invalid_argument_error>([&] { revert_sync_batchnorm(model); });
  CHECK_MESSAGE(contains(text, "normalizes by the unbiased variance"), text);
  for (auto const parts : {syncnorm::affine_parts::gamma, syncnorm::affine_parts::beta}) {
    SyncBatchNorm const alone{BatchNormOptions{3}, syncnorm::any_communicator{}, 2, parts};
    text = message_of<syncnorm::invalid_argument_error>([&] { revert_sync_batchnorm(alone.ptr()); });
    CHECK_MESSAGE(contains(text, "a weight or a bias alone"), text);
  }
  CHECK(kinds_of(*model) == kinds);
}

TEST_CASE("SyncBatchNorms that a model has already get the communicator, and lose it again") {
  syncnorm::run_ranks(3, [](syncnorm::thread_communicator const& comm) {
    SyncTyped const typed;
    nn::Sequential model{typed, nn::BatchNorm2d{3}};
    convert_sync_batchnorm(model.ptr(), comm);
    CHECK(syncnorm::size(typed->bn->communicator()) == 3);
    convert_sync_batchnorm(typed.ptr(), syncnorm::self_communicator{});
    CHECK(syncnorm::size(typed->bn->communicator()) == 1);
    convert_sync_batchnorm(model.ptr(), comm);
    revert_sync_batchnorm(model.ptr());
    CHECK(syncnorm::size(typed->bn->communicator()) == 1);
    CHECK(model->ptr(1)->as<nn::BatchNorm2d>() != nullptr);
  });
}

TEST_CASE("a setting of all SyncBatchNorms of a model") {
  Net net = convert_sync_batchnorm(Net{}, syncnorm::self_communicator{});
  int norms = 0;
  auto const freeze = [&](syncnorm::torch::SyncBatchNormImpl& norm) {
    norm.freeze_statistics();
    ++norms;
  };
  syncnorm::torch::for_each_sync_batch_norm(*net, freeze);
  CHECK(norms == 4);
  net->forward(torch::randn({2, 2, 3, 3}));
  for (auto const& buffer : net->named_buffers())
    if (buffer.key().ends_with("num_batches_tracked")) CHECK(buffer.value().item<std::int64_t>() == 0);
  syncnorm::torch::SyncBatchNorm alone{BatchNormOptions{3}};
  syncnorm::torch::for_each_sync_batch_norm(*alone, freeze);
  CHECK(alone->has_frozen_statistics());
  nn::Sequential twice{alone, nn::ReLU{}, alone};
  norms = 0;
  syncnorm::torch::for_each_sync_batch_norm(*twice, freeze);
  CHECK(norms == 1);
}

TEST_CASE("a module in several places is converted to one module") {
  nn::BatchNorm2d const shared{3};
  nn::Sequential first{shared, nn::ReLU{}, shared}, second{shared};
  nn::ModuleList model{first, second};
  convert_sync_batchnorm(model.ptr(), syncnorm::self_communicator{});
  auto const converted = first->ptr(0);
  CHECK(converted->as<SyncBatchNorm>() != nullptr);
  CHECK(first->ptr(2) == converted);
  CHECK(second->ptr(0) == converted);
  CHECK(first->named_children()["0"] == converted);
  CHECK(first->named_children()["2"] == converted);
  CHECK_THROWS_AS(convert_sync_batchnorm(nullptr, syncnorm::self_communicator{}), syncnorm::invalid_argument_error);
}

TEST_CASE("checkpoints load either way") {
  torch::manual_seed(13);
  auto const stored = [](auto const& module) {
    std::stringstream stream;
    torch::save(module, stream);
    return stream;
  };
  auto norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat);
  norm->forward(torch::randn({4, 3, 2, 2}));

  torch::nn::BatchNorm2d local{BatchNormOptions{3}};
  auto stream = stored(norm);
  torch::load(local, stream);
  CHECK(same_state(state_of(*local), state_of(*norm)));
  CHECK(local->named_parameters().keys() == norm->named_parameters().keys());
  CHECK(local->named_buffers().keys() == norm->named_buffers().keys());

  SyncBatchNorm again{BatchNormOptions{3}};
  stream = stored(local);
  torch::load(again, stream);
  CHECK(same_state(state_of(*again), state_of(*norm)));
  CHECK(again->num_batches_tracked.item<std::int64_t>() == 1);

  for (bool const affine : {true, false}) {
    auto const options = BatchNormOptions{2}.affine(affine).track_running_stats(!affine);
    torch::nn::Sequential const from{torch::nn::Conv2d{torch::nn::Conv2dOptions(3, 2, 3)},
                                     torch::nn::BatchNorm2d{options}};
    torch::nn::Sequential into{torch::nn::Conv2d{torch::nn::Conv2dOptions(3, 2, 3)}, SyncBatchNorm{options}};
    stream = stored(from);
    torch::load(into, stream);
    CHECK(same_state(state_of(*into), state_of(*from)));
  }
}

TEST_CASE("a clone has the same state and nothing in common with its original") {
  torch::manual_seed(14);
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}.momentum(c10::nullopt), comm);
    auto const x = torch::linspace(-1, 2, 24, torch::kDouble).view({2, 3, 4}) * (comm.rank() + 1);
    norm->forward(x);
    auto const copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
    REQUIRE(copy != nullptr);
    auto const before = state_of(*norm);
    CHECK(same_state(state_of(*copy), before));
    auto const y = copy->forward(x);
    CHECK(same_state(state_of(*norm), before));
    CHECK(copy->num_batches_tracked.item<std::int64_t>() == 2);
    CHECK(torch::equal(y, norm->forward(x)));
    CHECK(same_state(state_of(*norm), state_of(*copy)));
    CHECK(copy->backward_exchange());
    norm->set_backward_exchange(false);
    CHECK_FALSE(std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone())->backward_exchange());
    CHECK(copy->backward_exchange());
  });
}

TEST_CASE("a clone and what converts have as many channels as the tensors, whatever options say") {
  torch::manual_seed(15);
  auto const x = torch::randn({4, 3, 5}, torch::kDouble);
  auto norm = make_norm(BatchNormOptions{3});
  norm->options.num_features(5);
  auto const copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone());
  CHECK(torch::equal(copy->forward(x), norm->forward(x)));
  for (bool const affine : {true, false}) {
    torch::nn::BatchNorm1d three{BatchNormOptions{3}.affine(affine)}, loaded{BatchNormOptions{7}.affine(affine)};
    std::stringstream file;
    torch::save(three, file);
    torch::load(loaded, file); // takes the extents of what is in the file
    auto const floats = x.to(torch::kFloat), expected = three->forward(floats);
    auto const made = syncnorm::torch::convert_sync_batchnorm(loaded.ptr(), syncnorm::self_communicator{});
    CHECK(error_of(made->as<SyncBatchNormImpl>()->forward(floats), expected, 1) <= 1e-5);
  }
}

TEST_CASE("a clone and what converts have the tensors that their original has, whatever options say") {
  torch::manual_seed(16);
  auto const x = torch::randn({4, 3, 5});
  auto const check = [&](SyncBatchNormImpl& norm, std::size_t parameters, std::size_t buffers) {
    auto const copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(norm.clone());
    CHECK(copy->parameters().size() == parameters);
    CHECK(copy->buffers().size() == buffers);
    CHECK(torch::equal(copy->forward(x), norm.forward(x)));
    norm.reset_parameters();
    norm.reset_running_stats();
  };
  for (bool const made : {true, false}) {
    auto const options = BatchNormOptions{3}.affine(made).track_running_stats(made);
    SyncBatchNorm norm{options};
    torch::nn::BatchNorm1d local{options};
    for (auto* const changed : {&norm->options, &local->options}) changed->affine(!made).track_running_stats(!made);
    check(*norm, made ? 2 : 0, made ? 3 : 0);
    auto const converted = syncnorm::torch::convert_sync_batchnorm(local.ptr(), syncnorm::self_communicator{});
    check(*converted->as<SyncBatchNormImpl>(), made ? 2 : 0, made ? 3 : 0);
  }
}

TEST_CASE("a pass that is traced on one rank is an error on every rank") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    auto const x = torch::ones({2, 3}, torch::kDouble);
    auto const before = state_of(*norm);
    at::tracer::impl::set_dispatch_enabled(comm.rank() == 1);
    auto const text = message_of<syncnorm::invalid_argument_error>([&] { norm->forward(x); });
    at::tracer::impl::set_dispatch_enabled(false);
    CHECK_MESSAGE(contains(text, "rank 1: the pass is traced for TorchScript, which cannot be done"), text);
    CHECK(same_state(before, state_of(*norm)));
  });
}

TEST_CASE("a module that has loaded the state of another number of channels refuses it in every mode") {
  torch::nn::BatchNorm1d five{BatchNormOptions{5}};
  std::stringstream file;
  torch::save(five, file);
  syncnorm::torch::SyncBatchNorm norm{BatchNormOptions{3}};
  torch::load(norm, file);
  for (std::int64_t const channels : {3, 5})
    for (bool const training : {true, false})
      for (bool const frozen : {false, true}) {
        norm->train(training);
        norm->freeze_statistics(frozen);
        auto const text = message_of<syncnorm::invalid_argument_error>([&] {
          norm->forward(torch::ones({2, channels, 4}));
        });
        CHECK_MESSAGE(contains(text, "expected 3"), text);
      }
}

TEST_CASE("parameters that are views of negated memory are read as they are") {
  auto const values = torch::full({1}, 0.75, torch::kDouble);
  auto const negated = torch::imag(torch::complex(torch::zeros_like(values), -values).conj());
  REQUIRE(negated.is_neg());
  auto const x = torch::randn({4, 1, 5}, torch::kDouble);
  auto norm = make_norm(BatchNormOptions{1}), plain = make_norm(BatchNormOptions{1});
  norm->weight.set_data(negated), plain->weight.set_data(values);
  norm->bias.set_data(negated), plain->bias.set_data(values);
  auto const leaf = x.clone().requires_grad_(), other = x.clone().requires_grad_();
  auto const y = norm->forward(leaf), expected = plain->forward(other);
  CHECK(torch::equal(y, expected));
  y.pow(3).sum().backward(), expected.pow(3).sum().backward();
  CHECK(torch::equal(leaf.grad(), other.grad()));
}

TEST_CASE("a module prints what it is") {
  std::ostringstream text;
  text << make_norm(BatchNormOptions{4}.momentum(c10::nullopt).affine(false));
  CHECK(text.str() ==
        "syncnorm::torch::SyncBatchNorm(4, eps=1e-05, momentum=None, affine=false, track_running_stats=true, ranks=1)");
}
