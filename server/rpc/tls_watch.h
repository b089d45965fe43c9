#ifndef EXPERTMESH_SERVER_RPC_TLS_WATCH_H_
#define EXPERTMESH_SERVER_RPC_TLS_WATCH_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/rpc/tls_files.h"

namespace expertmesh {

// Stands between TLS's files and gRPC, which watches files itself, but aborts over an empty one and
// serves nobody while key and certificate do not fit each other. A thread looks at the files every
// second; what can serve is put where gRPC looks, and what cannot is said once and changes nothing.
// What gRPC looks at is memory of this process: a private key is written to no disk.
class TlsWatch {
 public:
  // CheckServerTls or CheckChannelTls.
  using Check = absl::Status (*)(const TlsTexts& texts);
  // Null without files. Else blocks for a first look; NOT_FOUND or INVALID_ARGUMENT name the flag
  // that it fails on, UNAVAILABLE: the system gives no memory files, RESOURCE_EXHAUSTED: no thread.
  static absl::StatusOr<std::shared_ptr<TlsWatch>> Start(const TlsFiles& files, Check check);
  // Ends the thread. gRPC may look for as long as it likes: the places stay.
  ~TlsWatch();
  TlsWatch(const TlsWatch&) = delete;
  TlsWatch& operator=(const TlsWatch&) = delete;

  // Paths to read: key and chain in one file, and the authority; empty where there is none.
  const std::string& identity_path() const { return identity_.path; }
  const std::string& ca_path() const { return ca_.path; }

 private:
  // A file in memory. Its path reads what was written last, all of it.
  struct Place {
    int fd = -1;
    std::string path;
  };

  TlsWatch(TlsFiles files, Check check) : files_(std::move(files)), check_(check) {}

  absl::StatusOr<TlsTexts> Read() const;
  absl::Status Put(const TlsTexts& texts);
  absl::Status Write(const std::string& text, Place* place);
  void Look();
  void Refuse(const absl::Status& status);
  void Run();

  const TlsFiles files_;
  const Check check_;
  TlsTexts in_use_;
  absl::Time not_after_ = absl::InfiniteFuture();
  Place identity_;
  Place ca_;
  int64_t modified_seconds_ = 0;
  std::string suspect_;  // why the last look found nothing that can serve
  std::string refused_;  // what was last said of it

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_TLS_WATCH_H_
