// Values of the C++ API that Python holds: plans and communicators in torchbind clothes.
#pragma once

#include <torch/custom_class.h>

#include "dmuon/plan.h"
#include "dmuon/recording_communicator.h"
#include "dmuon/reproducible_communicator.h"

namespace dmuon::bindings {

struct PlanHandle : torch::CustomClassHolder {
  explicit PlanHandle(plan::Plan value) : plan(std::move(value)) {}
  plan::Plan plan;
};

/// `communicator` is what the runtime calls; `recorder` counts what reaches the wire.
struct CommunicatorHandle : torch::CustomClassHolder {
  CommunicatorHandle(CommunicatorPtr inner, bool reproducible)
      : recorder(std::make_shared<RecordingCommunicator>(std::move(inner))), communicator(recorder) {
    if (reproducible) communicator = std::make_shared<ReproducibleCommunicator>(recorder);
  }
  std::shared_ptr<RecordingCommunicator> recorder;
  CommunicatorPtr communicator;
};

using PlanPtr = c10::intrusive_ptr<PlanHandle>;
using CommunicatorHandlePtr = c10::intrusive_ptr<CommunicatorHandle>;

}  // namespace dmuon::bindings
