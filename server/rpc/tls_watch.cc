#include "server/rpc/tls_watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/ops/logging.h"
#include "server/ops/start_thread.h"

namespace expertmesh {
namespace {

constexpr std::chrono::seconds kBetweenLooks(1);

absl::Status SystemError(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::shared_ptr<TlsWatch>> TlsWatch::Start(const TlsFiles& files, Check check) {
  if (files.empty()) return nullptr;
  std::shared_ptr<TlsWatch> watch(new TlsWatch(files, check));
  absl::StatusOr<TlsTexts> texts = watch->Read();
  if (!texts.ok()) return texts.status();
  if (absl::Status status = watch->Put(*texts); !status.ok()) return status;
  absl::StatusOr<std::thread> thread = StartThread([raw = watch.get()] { raw->Run(); });
  if (!thread.ok()) return thread.status();
  watch->thread_ = *std::move(thread);
  return watch;
}

TlsWatch::~TlsWatch() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

absl::StatusOr<TlsTexts> TlsWatch::Read() const {
  absl::StatusOr<TlsTexts> texts = ReadTlsFiles(files_);
  if (!texts.ok()) return texts;
  if (absl::Status status = check_(*texts); !status.ok()) return status;
  return texts;
}

absl::Status TlsWatch::Put(const TlsTexts& texts) {
  if (!texts.certificate.empty()) {
    absl::StatusOr<TlsIdentity> identity = ReadTlsIdentity(texts);
    if (!identity.ok()) return identity.status();
    if (absl::Status status = Write(identity->pem, &identity_); !status.ok()) return status;
    not_after_ = identity->not_after;
  }
  if (!texts.ca.empty()) {
    if (absl::Status status = Write(texts.ca, &ca_); !status.ok()) return status;
  }
  in_use_ = texts;
  return absl::OkStatus();
}

absl::Status TlsWatch::Write(const std::string& text, Place* place) {
  const int fd = memfd_create("tls", MFD_CLOEXEC);
  if (fd < 0) return SystemError("memfd_create");
  // gRPC reads key and chain one after the other, and again if the time, in seconds, has changed.
  const timespec time = {.tv_sec = static_cast<time_t>(++modified_seconds_), .tv_nsec = 0};
  const timespec times[] = {time, time};
  absl::Status status;
  if (fchmod(fd, 0600) != 0 || write(fd, text.data(), text.size()) != ssize_t(text.size()) ||
      futimens(fd, times) != 0 || (place->fd >= 0 && dup3(fd, place->fd, O_CLOEXEC) < 0)) {
    status = SystemError("a file in memory");
  }
  if (place->fd >= 0 || !status.ok()) {
    close(fd);
  } else {
    place->fd = fd;
    place->path = absl::StrCat("/proc/self/fd/", fd);
  }
  return status;
}

void TlsWatch::Refuse(const absl::Status& status) {
  const std::string why(status.message());
  // Once is no proof: files may be in the middle of a change.
  if (why != suspect_) {
    suspect_ = why;
    return;
  }
  if (why == refused_) return;
  refused_ = why;
  LogError("TLS files cannot be used; those from before stay in use",
           {{"why", why},
            {"tls_cert", files_.certificate},
            {"tls_key", files_.key},
            {"tls_ca", files_.ca}});
}

void TlsWatch::Look() {
  const absl::StatusOr<TlsTexts> texts = Read();
  if (!texts.ok()) return Refuse(texts.status());
  const bool is_new = *texts != in_use_;
  if (is_new) {
    if (absl::Status status = Put(*texts); !status.ok()) return Refuse(status);
  }
  suspect_.clear();
  if (!is_new && refused_.empty()) return;
  refused_.clear();
  LogInfo(is_new ? "TLS files have changed: new connections use them"
                 : "TLS files are again those that are in use",
          {{"not_after", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", not_after_, absl::UTCTimeZone())},
           {"tls_cert", files_.certificate}});
}

void TlsWatch::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kBetweenLooks, [this] { return stopped_; })) {
    lock.unlock();
    Look();
    lock.lock();
  }
}

}  // namespace expertmesh
