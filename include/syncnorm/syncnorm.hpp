#pragma once

#include <syncnorm/config.hpp>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/checked.hpp>
#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/channel_moments.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/core/moments.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/group_scaling.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>
#include <syncnorm/ops/power_norm.hpp>
#include <syncnorm/version.hpp>
