#include <ATen/ATen.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "dmuon/checkpoint.h"

namespace dmuon {
namespace {

namespace fs = std::filesystem;

fs::path normal(const std::string& path) {
  auto result = fs::absolute(path).lexically_normal();
  return result.has_filename() ? result : result.parent_path();
}

fs::path partial_of(const fs::path& path) {
  return path.parent_path() / c10::str(".", path.filename().string(), ".partial");
}

void fail(const std::string& what) { TORCH_CHECK(false, "[dmuon.checkpoint] ", what, ": ", std::strerror(errno)); }

void sync(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(c10::str("cannot open ", path.string()));
  const int result = ::fsync(file);
  ::close(file);
  if (result != 0) fail(c10::str("cannot write ", path.string(), " to disk"));
}

// Both names exist before and after.  Not every file system can.
void replace(const fs::path& partial, const fs::path& path) {
  if (::syscall(SYS_renameat2, AT_FDCWD, partial.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) != 0) {
    fail(c10::str("the file system cannot exchange ", path.string(), " for the new checkpoint, which is complete in ",
                  partial.string(), "; save to a new directory, or remove the old one and rename"));
  }
  sync(path.parent_path());
  std::error_code ignored;
  fs::remove_all(partial, ignored);  // the old checkpoint by now; a leftover does no harm
}

void publish_directory(const fs::path& path, const std::string& plans, const std::string& files) {
  const auto partial = partial_of(path);
  std::ofstream info(partial / kCheckpointInfo);
  info << "dmuon checkpoint\nformat_version " << kCheckpointVersion << "\nplans " << plans << "\nfiles\n" << files;
  info.close();
  TORCH_CHECK(info, "[dmuon.checkpoint] cannot write ", kCheckpointInfo, " in ", partial.string());
  for (const auto& entry : fs::directory_iterator(partial)) sync(entry.path());
  sync(partial);
  if (fs::exists(path)) return replace(partial, path);
  if (::rename(partial.c_str(), path.c_str()) != 0) fail(c10::str("cannot rename to ", path.string()));
  sync(path.parent_path());
}

// `line`: name, bytes, checksum.
std::string file_problem(const fs::path& directory, const std::string& line) {
  std::istringstream words(line);
  std::string name;
  std::uintmax_t bytes = 0;
  std::uint64_t checksum = 0;
  if (!(words >> name >> bytes >> checksum)) return c10::str(kCheckpointInfo, " has an unreadable line: ", line);
  std::error_code error;
  const auto found = fs::file_size(directory / name, error);
  if (error) return c10::str("file ", name, " is missing (", error.message(), ")");
  if (found != bytes) return c10::str("file ", name, " has ", found, " bytes, expected ", bytes, ": it was truncated");
  if (file_checksum(directory / name) != checksum) return c10::str("file ", name, " is damaged: another checksum");
  return "";
}

std::string describe_quietly(const fs::path& directory, const std::string& prefix, std::string& problem) {
  try {
    return describe_files(directory, prefix);
  } catch (const std::exception& error) {
    problem = error.what();
    return "";
  }
}

}  // namespace

std::string begin_directory(const std::string& path, bool overwrite) {
  const auto to = normal(path);
  TORCH_CHECK(overwrite || !fs::exists(to), "[dmuon.checkpoint] ", to.string(),
              " exists; choose another name, or pass overwrite=True");
  const auto partial = partial_of(to);
  fs::remove_all(partial);
  fs::create_directories(partial);
  return partial;
}

std::string describe_files(const std::string& directory, const std::string& prefix) {
  std::string text;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with(prefix)) continue;
    text += c10::str(name, " ", entry.file_size(), " ", file_checksum(entry.path()), "\n");
  }
  return text;
}

void commit_directory(const CheckpointAxes& axes, const std::string& path, const std::string& prefix,
                      const std::string& plans) {
  const auto to = normal(path);
  std::string problem;
  std::string files = describe_quietly(partial_of(to), prefix, problem);
  const bool first = axes.here() == plan::Slot{};
  if (first) files += describe_quietly(partial_of(to), ".metadata", problem);
  for (auto* axis : axes.all()) {
    std::string all;
    for (const auto& others : axis->exchange(files)) all += others;
    files = all;
  }
  agree_on_state(axes, "save_checkpoint", problem, "");
  try {
    if (first) publish_directory(to, plans, files);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  agree_on_state(axes, "save_checkpoint", problem, "");
}

std::string directory_problem(const std::string& directory, int part, int parts) {
  std::ifstream info(fs::path(directory) / kCheckpointInfo);
  std::string line;
  std::int64_t version = 0;
  while (std::getline(info, line) && line != "files") {
    if (line.starts_with("format_version ")) version = std::stoll(line.substr(15));
  }
  if (line != "files" || version == 0) {
    return c10::str(directory, " has no readable ", kCheckpointInfo,
                    ": it is incomplete, or dmuon.save_checkpoint did ",
                    "not write it. Load other checkpoints with torch.distributed.checkpoint, or dmuon.import_state");
  }
  auto problem = version_problem(version);
  for (int i = 0; problem.empty() && std::getline(info, line); ++i) {
    if (i % parts == part) problem = file_problem(directory, line);
  }
  return problem.empty() ? "" : c10::str(directory, ": ", problem);
}

}  // namespace dmuon
