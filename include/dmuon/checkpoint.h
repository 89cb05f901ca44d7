// Checkpoints: how an owner's matrix becomes rows on all ranks and back, and what is checked before anything is
// changed.
//
// A matrix that one rank owns is saved as torch's DTensor with Shard(0) would be: rank r of the shard group writes the
// r-th part of its rows.  So files look like FSDP2's, every rank writes its share, and nothing in them depends on who
// owned what.  One matrix travels at a time: beside its own rows a rank holds at most one matrix more.
//
// Called by the bindings, or by a C++ program that writes its own files.  All functions that take CheckpointAxes are
// collective: every rank calls them in the same order, and no other call of these communicators may be outstanding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/communicator.h"
#include "dmuon/plan.h"

namespace dmuon {

/// Raised when a checkpoint is laid out so that older versions would misread it.  Versions up to this one are read.
inline constexpr std::int64_t kCheckpointVersion = 1;

/// The communicators of a model's ranks; `replicate` is null without a replicate mesh.
struct CheckpointAxes {
  CommunicatorPtr shard;
  CommunicatorPtr replicate;

  [[nodiscard]] plan::Slot here() const { return {shard->rank(), replicate ? replicate->rank() : 0}; }
  /// Both, less the one that does not exist.
  [[nodiscard]] std::vector<Communicator*> all() const;
};

/// One matrix, [rows, cols], in `options`' dtype and on its device; of an elementwise parameter the first dimension and
/// the product of the others.
struct MatrixPlace {
  std::string name;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  plan::Slot owner;
  at::TensorOptions options;
};

/// This rank's rows of the matrix, in memory of their own; the same on every replica.  `owned`: the matrix on its
/// owner, undefined elsewhere.  Runs on the current stream; on CPU it blocks the host. Throws c10::Error naming the
/// matrix, before any communication, if the owner's tensor does not fit `place`.
[[nodiscard]] at::Tensor scatter_rows(const CheckpointAxes& axes, const MatrixPlace& place, const at::Tensor& owned);

/// The reverse: the owner's replica row sends its rows, and `owned`, on the owner, takes them.  `rows`: this rank's
/// part, of any floating dtype and device.  Throws c10::Error naming the matrix, before any communication, if its shape
/// is not this rank's part.
void gather_rows(const CheckpointAxes& axes, const MatrixPlace& place, const at::Tensor& rows, const at::Tensor& owned);

/// One named tensor of a state: what a model expects, or what was given to it.
struct StateEntry {
  std::string key;
  std::vector<std::int64_t> sizes;
  std::string sharding;  ///< how it is cut, in any words; "" in what is expected: any way will do
};

/// What is wrong with `given` for a model that expects `expected`: wrong shapes and shardings, and with `strict`
/// missing and unexpected keys; up to ten names of each kind.  "" if nothing is.
[[nodiscard]] std::string state_problem(const std::vector<StateEntry>& expected, const std::vector<StateEntry>& given,
                                        bool strict);

/// A line an entry, in the order of their keys: what all ranks must have in common.
[[nodiscard]] std::string describe_state(const std::vector<StateEntry>& entries);

/// All ranks say what is wrong with what they were given ("" for nothing) and what it looks like, a line an entry.
/// Throws the same c10::Error on every rank, naming the entry, if any rank has a problem or the descriptions differ.
/// `caller` begins the message.  Called before anything is changed.
void agree_on_state(const CheckpointAxes& axes, const std::string& caller, const std::string& problem,
                    const std::string& description);

/// What a load must know of one of an optimizer's parameter groups.
struct OptimizerGroup {
  bool muon = false;
  std::int64_t params = 0;
  std::int64_t version = kCheckpointVersion;  ///< of the format, in what is given
};

/// "" or why an optimizer of groups `expected` cannot take a state of groups `given`.
[[nodiscard]] std::string groups_problem(const std::vector<OptimizerGroup>& expected,
                                         const std::vector<OptimizerGroup>& given);

/// "" or why a checkpoint of this format version cannot be read.
[[nodiscard]] std::string version_problem(std::int64_t version);

// ---- directories: whole or not there, and known to be unharmed ----------------------------------------------------

/// Name of the text file that says of a directory: this is a whole checkpoint of this format version, saved under these
/// plans, with these files.  DCP has no checksums; these are ours.
inline constexpr const char* kCheckpointInfo = "dmuon.txt";

/// A 64-bit checksum of a file's bytes: finds damage, not forgery.  Reads in parallel.  Throws c10::Error if it cannot.
[[nodiscard]] std::uint64_t file_checksum(const std::string& path);

/// Where `path` is written first: a directory beside it.  Made new; a leftover of a run that was killed goes.
/// Throws c10::Error if `path` is there already and `overwrite` is false.
std::string begin_directory(const std::string& path, bool overwrite);

/// One line a file of the directory whose name begins with `prefix`: name, bytes, checksum.
[[nodiscard]] std::string describe_files(const std::string& directory, const std::string& prefix);

/// Collective: every rank describes the files it wrote (`prefix`), and the first rank makes what `begin_directory` gave
/// the checkpoint `path`, in one step: whoever looks, and whoever is killed, finds either all of it or none.  One that
/// is there already is replaced in the same way.  All of it is on disk when this returns.
/// plans: fingerprints, for people who ask whether two runs had the same owners.
/// Throws the same c10::Error on every rank if that fails; then `path` is as it was.
void commit_directory(const CheckpointAxes& axes, const std::string& path, const std::string& prefix,
                      const std::string& plans);

/// "" or why the directory cannot be read as a checkpoint: not a whole one, a newer format version, files that are
/// missing, of another length, or damaged.  Looks into every `parts`-th file, from the `part`-th on.
[[nodiscard]] std::string directory_problem(const std::string& directory, int part, int parts);

}  // namespace dmuon
