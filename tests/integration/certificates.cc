#include "tests/integration/certificates.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/process.h"

namespace expertmesh {
namespace {

void RunOpenssl(std::vector<std::string> args) {
  const FinishedProcess made = RunToEnd({.path = "/usr/bin/openssl", .args = std::move(args)});
  EXPECT_EQ(made.exit_code, 0) << made.err;
}

std::vector<std::string> NewKeyArgs(const std::string& path, const std::string& common_name) {
  return {"req",         "-x509",    "-newkey",
          "ec",          "-pkeyopt", "ec_paramgen_curve:prime256v1",
          "-nodes",      "-subj",    "/CN=" + common_name,
          "-days",       "2",        "-keyout",
          path + ".key", "-out",     path + ".crt"};
}

}  // namespace

Certificates::Certificates(const std::string& name)
    : folder_(testing::TempDir() + absl::StrCat("/", name, "_", getpid())) {
  std::filesystem::create_directory(folder_);
}

Certificates::~Certificates() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void Certificates::MakeAuthority(const std::string& generation) const {
  std::filesystem::create_directory(Path(generation));
  RunOpenssl(NewKeyArgs(Path(generation + "/ca"), "authority " + generation));
}

void Certificates::Make(const std::string& generation, const std::string& name,
                        const std::string& common_name,
                        const std::string& alternative_names) const {
  std::vector<std::string> args =
      NewKeyArgs(Path(absl::StrCat(generation, "/", name)), common_name);
  const std::string ca = Path(generation + "/ca");
  for (const std::string& arg :
       {std::string("-CA"), ca + ".crt", std::string("-CAkey"), ca + ".key", std::string("-addext"),
        "subjectAltName=" + alternative_names, std::string("-addext"),
        std::string("basicConstraints=critical,CA:FALSE")}) {
    args.push_back(arg);
  }
  RunOpenssl(std::move(args));
}

void Certificates::GoLive(const std::string& generation) const {
  const std::string unfinished = Path("live.tmp");
  std::filesystem::create_directory_symlink(generation, unfinished);
  EXPECT_EQ(std::rename(unfinished.c_str(), Path("live").c_str()), 0);
}

}  // namespace expertmesh
