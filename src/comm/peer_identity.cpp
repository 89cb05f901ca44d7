#include "comm/peer_identity.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace dmuon {
namespace {

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

std::string to_text(const PeerIdentity& identity) {
  return one_line(identity.host) + '\n' + one_line(identity.gpu) + '\n' + one_line(identity.unreachable) + '\n' +
         one_line(identity.problem) + '\n';
}

PeerIdentity to_identity(const std::string& text) {
  PeerIdentity identity;
  std::istringstream lines(text);
  for (auto* field : {&identity.host, &identity.gpu, &identity.unreachable, &identity.problem}) {
    std::getline(lines, *field);
  }
  return identity;
}

std::string obstacle(const std::vector<PeerIdentity>& ranks, int most) {
  if (static_cast<int>(ranks.size()) > most) {
    return "the group has " + std::to_string(ranks.size()) + " ranks, more than " + std::to_string(most);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& each = ranks[rank];
    const auto name = "rank " + std::to_string(rank);
    if (!each.problem.empty()) return name + ": " + each.problem;
    if (!each.unreachable.empty()) return name + " cannot reach its peers' memory: " + each.unreachable;
    if (each.host != ranks[0].host) return name + " runs on another host than rank 0";
    for (std::size_t other = 0; other < rank; ++other) {
      if (each.gpu == ranks[other].gpu) return name + " uses the same GPU as rank " + std::to_string(other);
    }
  }
  return "";
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (!boot.empty()) return boot;
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

}  // namespace dmuon
