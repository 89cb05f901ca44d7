#include "dmuon/safetensors.h"

#include <ATen/ATen.h>

#include <array>
#include <cstdio>
#include <filesystem>

namespace dmuon {
namespace {

const char* dtype_name(const FileTensor& tensor) {
  switch (tensor.dtype) {
    case at::kDouble:
      return "F64";
    case at::kFloat:
      return "F32";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kLong:
      return "I64";
    case at::kInt:
      return "I32";
    case at::kShort:
      return "I16";
    case at::kChar:
      return "I8";
    case at::kByte:
      return "U8";
    case at::kBool:
      return "BOOL";
    default:
      TORCH_CHECK(false, "[dmuon.safetensors] tensor '", tensor.name, "' has dtype ", tensor.dtype,
                  ", which the format does not have; export it as another one");
  }
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      result += c;
      continue;
    }
    std::array<char, 8> escaped{};
    std::snprintf(escaped.data(), escaped.size(), "\\u%04x", static_cast<unsigned>(c));
    result += escaped.data();
  }
  return result + "\"";
}

std::int64_t bytes_of(const FileTensor& tensor) {
  auto bytes = static_cast<std::int64_t>(at::elementSize(tensor.dtype));
  for (const auto size : tensor.sizes) bytes *= size;
  return bytes;
}

std::string joined(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (const auto size : sizes) text += c10::str(text.empty() ? "" : ",", size);
  return text;
}

std::string little_endian(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((value >> (8 * i)) & 0xff);
  return bytes;
}

}  // namespace

std::string safetensors_header(const std::vector<FileTensor>& tensors) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::int64_t begin = 0;
  for (const auto& tensor : tensors) {
    const auto end = begin + bytes_of(tensor);
    header += c10::str(",", quoted(tensor.name), R"(:{"dtype":")", dtype_name(tensor), R"(","shape":[)",
                       joined(tensor.sizes), R"(],"data_offsets":[)", begin, ",", end, "]}");
    begin = end;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<FileTensor> tensors)
    : path_(path), partial_(path + ".partial"), tensors_(std::move(tensors)) {
  const auto header = safetensors_header(tensors_);
  file_.open(partial_, std::ios::binary | std::ios::trunc);
  file_ << little_endian(header.size()) << header;
  TORCH_CHECK(file_, "[dmuon.safetensors] cannot write ", partial_);
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!file_.is_open()) return;
  file_.close();
  std::error_code ignored;
  std::filesystem::remove(partial_, ignored);
}

void SafetensorsWriter::write(const at::Tensor& tensor) {
  TORCH_CHECK(next_ < tensors_.size(), "[dmuon.safetensors] ", path_, " has all its ", tensors_.size(), " tensors");
  const auto& expected = tensors_[next_++];
  TORCH_CHECK(tensor.sizes() == expected.sizes, "[dmuon.safetensors] tensor '", expected.name, "' is ", tensor.sizes(),
              ", expected ", at::IntArrayRef(expected.sizes));
  const auto host = tensor.detach().to(at::kCPU, expected.dtype).contiguous();
  file_.write(static_cast<const char*>(host.data_ptr()), static_cast<std::streamsize>(host.nbytes()));
}

void SafetensorsWriter::close() {
  TORCH_CHECK(next_ == tensors_.size(), "[dmuon.safetensors] ", path_, " has ", next_, " of ", tensors_.size(),
              " tensors");
  file_.close();
  TORCH_CHECK(file_, "[dmuon.safetensors] cannot write ", partial_, ": is the disk full?");
  std::filesystem::rename(partial_, path_);
}

}  // namespace dmuon
