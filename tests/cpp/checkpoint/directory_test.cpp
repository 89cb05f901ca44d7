#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "comm/thread_ranks.h"
#include "dmuon/checkpoint.h"
#include "dmuon/thread_communicator.h"

namespace dmuon {
namespace {

namespace fs = std::filesystem;
using ::testing::Each;
using ::testing::Eq;
using ::testing::HasSubstr;

class Directory : public ::testing::Test {
 protected:
  Directory() {
    std::string pattern = fs::temp_directory_path() / "dmuon-XXXXXX";
    root_ = ::mkdtemp(pattern.data());
  }
  ~Directory() override { fs::remove_all(root_); }

  static void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

  // Two ranks write a file each; rank 0 the index too.
  [[nodiscard]] std::vector<std::string> save(const std::string& path, const std::string& content) const {
    const auto world = make_thread_world(2, std::chrono::seconds(10));
    const fs::path partial = begin_directory(path, true);
    return errors_on_threads(2, [&](int rank) {
      const CheckpointAxes axes{make_thread_communicator(world, rank), nullptr};
      write(partial / c10::str("__", rank, "_0.data"), content);
      if (rank == 0) write(partial / ".metadata", "index of " + content);
      commit_directory(axes, path, c10::str("__", rank, "_"), "abc");
    });
  }

  fs::path root_;
};

TEST_F(Directory, AppearsWholeAndIsReplacedWhole) {
  const std::string path = root_ / "a";
  EXPECT_THAT(save(path, "one"), Each(Eq("")));
  EXPECT_THAT(directory_problem(path, 0, 1), Eq(""));
  EXPECT_THROW(begin_directory(path, false), c10::Error);
  EXPECT_THAT(save(path, "two"), Each(Eq("")));
  EXPECT_THAT(directory_problem(path, 0, 1), Eq(""));
  std::string content;
  std::ifstream(fs::path(path) / "__1_0.data") >> content;
  EXPECT_EQ(content, "two");
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1) << "a leftover beside the checkpoint";
}

TEST_F(Directory, AnUnfinishedOneIsNotThere) {
  const std::string path = root_ / "a";
  write(fs::path(begin_directory(path, false)) / "__0_0.data", "half");
  EXPECT_FALSE(fs::exists(path));
  EXPECT_THAT(directory_problem(path, 0, 1), HasSubstr("no readable dmuon.txt"));
  EXPECT_TRUE(fs::is_empty(begin_directory(path, false))) << "the next run starts afresh";
}

TEST_F(Directory, EveryByteOfEveryFileIsChecked) {
  const std::string path = root_ / "a";
  EXPECT_THAT(save(path, "some content of a file"), Each(Eq("")));
  for (const auto* name : {"__0_0.data", "__1_0.data", ".metadata"}) {
    const fs::path file = fs::path(path) / name;
    std::string good(fs::file_size(file), ' ');
    std::ifstream(file, std::ios::binary).read(good.data(), static_cast<std::streamsize>(good.size()));
    for (size_t i = 0; i < good.size(); ++i) {
      auto bad = good;
      bad[i] = static_cast<char>(bad[i] ^ 1);
      write(file, bad);
      EXPECT_THAT(directory_problem(path, 0, 1), HasSubstr(c10::str(name, " is damaged"))) << "byte " << i;
    }
    write(file, good.substr(1));
    EXPECT_THAT(directory_problem(path, 0, 1), HasSubstr("it was truncated"));
    fs::remove(file);
    EXPECT_THAT(directory_problem(path, 0, 1), HasSubstr(c10::str("file ", name, " is missing")));
    write(file, good);
    EXPECT_THAT(directory_problem(path, 0, 1), Eq(""));
  }
}

TEST_F(Directory, RanksShareTheFiles) {
  const std::string path = root_ / "a";
  EXPECT_THAT(save(path, "content"), Each(Eq("")));
  write(fs::path(path) / "__1_0.data", "CONTENT");
  int found = 0;
  for (int rank = 0; rank < 3; ++rank) found += directory_problem(path, rank, 3).empty() ? 0 : 1;
  EXPECT_EQ(found, 1);
}

TEST_F(Directory, ARankThatCannotWriteFailsAll) {
  const std::string path = root_ / "a";
  EXPECT_THAT(save(path, "one"), Each(Eq("")));
  const auto world = make_thread_world(2, std::chrono::seconds(10));
  const auto errors = errors_on_threads(2, [&](int rank) {
    const CheckpointAxes axes{make_thread_communicator(world, rank), nullptr};
    commit_directory(axes, path, "__", "");  // nobody called begin_directory
  });
  EXPECT_THAT(errors, Each(HasSubstr("[dmuon.save_checkpoint] nothing was changed")));
  EXPECT_THAT(directory_problem(path, 0, 1), Eq(""));
}

TEST_F(Directory, ChecksumsOfLargeFiles) {
  const std::string path = root_ / "large";
  std::string content((std::size_t{9} << 20) + 5, 'x');
  write(path, content);
  const auto whole = file_checksum(path);
  EXPECT_EQ(file_checksum(path), whole);
  for (const auto place : {std::size_t{0}, std::size_t{4} << 20, (std::size_t{8} << 20) - 1, content.size() - 1}) {
    auto bad = content;
    bad[place] = 'y';
    write(path, bad);
    EXPECT_NE(file_checksum(path), whole) << place;
  }
  std::swap(content[1], content[0]);
  content[0] = 'z';
  write(path, content);
  const auto first = file_checksum(path);
  std::swap(content[0], content[std::size_t{4} << 20]);  // the same bytes in another block
  write(path, content);
  EXPECT_NE(file_checksum(path), first);
}

}  // namespace
}  // namespace dmuon
