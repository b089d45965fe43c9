#ifndef EXPERTMESH_TESTS_SERVER_RPC_FORWARD_STREAM_CLIENT_H_
#define EXPERTMESH_TESTS_SERVER_RPC_FORWARD_STREAM_CLIENT_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "expertmesh/v1/expert_service.grpc.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/client_context.h"
#include "tests/server/rpc/forward_stream_fixture.h"

namespace expertmesh {

// ErrorInfo.reason; empty without details.
std::string ReasonOf(const google::rpc::Status& status);
std::string ReasonOf(const grpc::Status& status);

// A stream of a StreamServer that a test drives by blocking calls. Not thread safe, but one thread
// may send while another one reads.
class ForwardStreamClient {
 public:
  using Stream = grpc::ClientReaderWriter<v1::ForwardStreamRequest, v1::ForwardStreamResponse>;

  explicit ForwardStreamClient(const StreamServer& server);

  // The server's message of that number; false when the stream has ended.
  bool Send(uint64_t stream_seq, int64_t num_tokens = 1);
  void Cancel(uint64_t stream_seq);
  v1::ForwardStreamResponse Read();
  // The next answer is that message's.
  void ExpectAnswer(uint64_t stream_seq);
  // The next answer must be some message's own hidden states; tells whose.
  uint64_t ReadAnswer(int64_t num_tokens = 1);
  // Of that many messages, in any order: two threads of the server may work on one stream.
  std::set<uint64_t> ReadAnswers(int count, int64_t num_tokens = 1);
  void ExpectError(uint64_t stream_seq, grpc::StatusCode code, const std::string& reason);
  void HalfClose();
  // Half-closes; no answer may come any more.
  grpc::Status Finish();
  Stream& stream() { return *stream_; }
  v1::ExpertService::Stub& stub() { return *stub_; }
  void Reset() { context_.TryCancel(); }

 private:
  void CheckAnswer(const v1::ForwardStreamResponse& response, int64_t num_tokens);

  const StreamServer& server_;
  std::unique_ptr<v1::ExpertService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<Stream> stream_;
  bool half_closed_ = false;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RPC_FORWARD_STREAM_CLIENT_H_
