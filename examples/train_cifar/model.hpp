#pragma once

#include <torch/torch.h>

#include "data_set.hpp"

namespace train_cifar {

/// The network, for images of 3x32x32 and scores of `classes`: three stages of convolution, normalization, ReLU and
/// pooling, with the batch normalization of libtorch, each rank for itself. It is one flat Sequential because that is
/// what convert_sync_batchnorm can replace modules in.
[[nodiscard]] inline torch::nn::Sequential make_network(int classes) {
  namespace nn = torch::nn;
  nn::Sequential network;
  int channels = 3;
  for (int const width : {16, 32, 64}) {
    network->push_back(nn::Conv2d{nn::Conv2dOptions{channels, width, 3}.padding(1).bias(false)});
    network->push_back(nn::BatchNorm2d{width});
    network->push_back(nn::ReLU{nn::ReLUOptions{}.inplace(true)});
    network->push_back(nn::MaxPool2d{2});
    channels = width;
  }
  network->push_back(nn::Conv2d{nn::Conv2dOptions{channels, 64, 3}.padding(1).bias(false)});
  network->push_back(nn::BatchNorm2d{64});
  network->push_back(nn::ReLU{nn::ReLUOptions{}.inplace(true)});
  network->push_back(nn::AdaptiveAvgPool2d{1});
  network->push_back(nn::Flatten{});
  network->push_back(nn::Linear{64, classes});
  return network;
}

} // namespace train_cifar
