#pragma once

#include <pthread.h>
#include <sched.h>

namespace syncnorm::detail {

/// While one lives, threads that the calling thread starts do not preempt others when they wake: they have Linux's policy
/// SCHED_BATCH. Not where the calling thread's own policy is another than SCHED_OTHER, nor where there is no such policy.
class batch_threads {
public:
  batch_threads() noexcept {
#ifdef SCHED_BATCH
    int policy = 0;
    if (pthread_getschedparam(pthread_self(), &policy, &parameters_) == 0 && policy == SCHED_OTHER)
      changed_ = pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters_) == 0;
#endif
  }
  ~batch_threads() {
    if (changed_) pthread_setschedparam(pthread_self(), SCHED_OTHER, &parameters_);
  }
  batch_threads(batch_threads const&) = delete;
  batch_threads& operator=(batch_threads const&) = delete;

private:
  sched_param parameters_{};
  bool changed_ = false;
};

} // namespace syncnorm::detail
