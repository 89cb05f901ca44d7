#include "dmuon/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace dmuon {
namespace {

namespace fs = std::filesystem;

std::string content_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

TEST(Safetensors, HeaderNamesEveryTensorAndItsPlace) {
  const auto header =
      safetensors_header({{"a", at::kFloat, {2, 3}}, {"b\"\\\n", at::kBFloat16, {}}, {"c", at::kBool, {0}}});
  EXPECT_EQ(header.size() % 8, 0U);
  EXPECT_EQ(header.substr(0, header.find_last_not_of(' ') + 1),
            R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
            R"("b\"\\\u000a":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},)"
            R"("c":{"dtype":"BOOL","shape":[0],"data_offsets":[26,26]}})");
  EXPECT_THROW(static_cast<void>(safetensors_header({{"z", at::kComplexFloat, {1}}})), c10::Error);
}

TEST(Safetensors, WritesTensorsOneAfterAnother) {
  const auto path = fs::temp_directory_path() / c10::str("dmuon-", ::getpid(), ".safetensors");
  const std::vector<FileTensor> tensors{{"a", at::kFloat, {2, 2}}, {"b", at::kBFloat16, {3}}};
  {
    SafetensorsWriter writer(path, tensors);
    EXPECT_FALSE(fs::exists(path));
    writer.write(at::arange(4, at::kDouble).view({2, 2}).t());
    EXPECT_THROW(writer.close(), c10::Error) << "a tensor is left";
    writer.write(at::ones({3}));
    EXPECT_THROW(writer.write(at::ones({3})), c10::Error) << "no tensor is left";
    writer.close();
  }
  const auto content = content_of(path);
  const auto header = safetensors_header(tensors);
  std::uint64_t length = 0;
  std::memcpy(&length, content.data(), 8);
  ASSERT_EQ(length, header.size());
  EXPECT_EQ(content.substr(8, length), header);
  ASSERT_EQ(content.size(), 8 + length + 16 + 6);
  float values[4];
  std::memcpy(values, content.data() + 8 + length, sizeof values);
  EXPECT_EQ(std::vector<float>(values, values + 4), (std::vector<float>{0, 2, 1, 3}));
  fs::remove(path);
}

TEST(Safetensors, AnUnfinishedFileGoes) {
  const auto path = fs::temp_directory_path() / c10::str("dmuon-", ::getpid(), "-unfinished.safetensors");
  {
    SafetensorsWriter writer(path, {{"a", at::kFloat, {2}}});
    EXPECT_THROW(writer.write(at::ones({3})), c10::Error);
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_FALSE(fs::exists(path.string() + ".partial"));
  EXPECT_THROW(SafetensorsWriter("/no/such/folder/x", {}), c10::Error);
}

}  // namespace
}  // namespace dmuon
