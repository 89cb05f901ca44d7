// Who could be a peer: what a rank tells the others about its host and its GPU before any memory is mapped, and what
// all of them conclude from it.
#pragma once

#include <string>
#include <vector>

namespace dmuon {

struct PeerIdentity {
  std::string host;         ///< of the kernel that runs there since its last start: equal names of hosts do not matter
  std::string gpu;          ///< UUID
  std::string unreachable;  ///< why a GPU of the list of peers cannot be reached; set in a second round
  std::string problem;      ///< anything that went wrong there
};

/// One text, for `Communicator::meet`; the fields may hold any characters but line ends, which become spaces.
[[nodiscard]] std::string to_text(const PeerIdentity& identity);
[[nodiscard]] PeerIdentity to_identity(const std::string& text);

/// Why these ranks cannot copy from each other, as far as this tells: names the first rank in the way.  The same on
/// every rank, as its input is.  "" when nothing speaks against it.  `most`: the largest possible number of ranks.
[[nodiscard]] std::string obstacle(const std::vector<PeerIdentity>& ranks, int most);

/// Of this machine.
[[nodiscard]] std::string host_identity();

}  // namespace dmuon
