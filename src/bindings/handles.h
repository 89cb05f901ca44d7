// Values of the C++ API that Python holds: plans and communicators in torchbind clothes.
#pragma once

#include <torch/custom_class.h>

#include "dmuon/plan.h"
#include "dmuon/recording_communicator.h"

namespace dmuon::bindings {

struct PlanHandle : torch::CustomClassHolder {
  explicit PlanHandle(plan::Plan value) : plan(std::move(value)) {}
  plan::Plan plan;
};

struct CommunicatorHandle : torch::CustomClassHolder {
  explicit CommunicatorHandle(CommunicatorPtr inner)
      : communicator(std::make_shared<RecordingCommunicator>(std::move(inner))) {}
  std::shared_ptr<RecordingCommunicator> communicator;
};

using PlanPtr = c10::intrusive_ptr<PlanHandle>;
using CommunicatorHandlePtr = c10::intrusive_ptr<CommunicatorHandle>;

}  // namespace dmuon::bindings
