// I4: replicas hold the same published bytes.
#include <sstream>

#include "dmuon/runtime.h"

namespace dmuon {
namespace {

// Position-dependent, so that swapped values do not cancel.
std::int64_t checksum(const at::Tensor& published) {
  const auto bytes = published.contiguous().view({-1}).view(at::kByte).to(at::kLong);
  const auto weights = at::arange(1, bytes.numel() + 1, bytes.options()).remainder_(65521);
  return bytes.mul(weights).sum().item<std::int64_t>();
}

}  // namespace

void Runtime::check_replicas() {
  if (!comms_.replicate) return;
  const at::NoGradGuard no_grad;
  wait_publishes();
  std::ostringstream mine;
  for (const auto& param : params_) {
    if (param->is_row_owner()) mine << param->name() << ' ' << checksum(param->owned_data()) << '\n';
  }
  const auto texts = comms_.replicate->exchange(mine.str());
  for (size_t replica = 1; replica < texts.size(); ++replica) {
    std::istringstream first(texts[0]);
    std::istringstream other(texts[replica]);
    std::string expected;
    std::string found;
    while (std::getline(first, expected) && std::getline(other, found)) {
      TORCH_CHECK(expected == found, "[dmuon] I4: in column ", rank_.shard, " replica ", replica, " holds '", found,
                  "' (name, checksum), replica 0 holds '", expected, "'");
    }
  }
}

}  // namespace dmuon
