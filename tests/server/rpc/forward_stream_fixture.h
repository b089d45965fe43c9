#ifndef EXPERTMESH_TESTS_SERVER_RPC_FORWARD_STREAM_FIXTURE_H_
#define EXPERTMESH_TESTS_SERVER_RPC_FORWARD_STREAM_FIXTURE_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "expertmesh/v1/expert_service.grpc.pb.h"
#include "grpcpp/channel.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/cluster/expert_group.h"
#include "server/control/forward_controller.h"
#include "server/model/model_spec.h"
#include "server/routing/router_table.h"
#include "server/rpc/expert_service.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/serving_state.h"
#include "tests/integration/bad_requests.h"

namespace expertmesh {

// Holds calls until the test lets go of them, which no real controller does; the answer to a call
// are its own hidden states. Thread safe.
class HeldController : public ForwardController {
 public:
  ~HeldController() override;

  ForwardCallId Submit(std::unique_ptr<ForwardCall> call, bool may_run_inline) override;
  void Cancel(ForwardCallId id) override;
  int64_t Drain(absl::Time) override { return 0; }

  // From now on calls are answered within Submit; those held are let go.
  void AnswerAtOnce();
  // Blocks until that many calls are held.
  void AwaitHeld(size_t num_calls);
  // Answers the held call of that request_id; false when there is none.
  bool Answer(const std::string& request_id);
  bool Fail(const std::string& request_id, absl::Status status);
  // Answers the one that was held first; false when none is.
  bool AnswerOldest();

  size_t num_held() const;
  size_t max_held() const;
  // With that request_id, while it is held.
  absl::Time deadline(const std::string& request_id) const;
  int num_cancelled() const;
  int num_inline() const;

 private:
  std::unique_ptr<ForwardCall> Take(const std::string& request_id);
  // With its answer unless `error` is one.
  static void Complete(std::unique_ptr<ForwardCall> call, absl::Status error = absl::OkStatus());

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool at_once_ = false;
  ForwardCallId next_id_ = 1;
  size_t max_held_ = 0;
  int num_cancelled_ = 0;
  int num_inline_ = 0;
  std::map<ForwardCallId, std::unique_ptr<ForwardCall>> held_;
};

// Only what the services ask of a group.
class AllocatingGroup : public ExpertGroup {
 public:
  explicit AllocatingGroup(Allocator* allocator) : allocator_(allocator) {}
  int32_t ep_size() const override { return 1; }
  uint64_t incarnation() const override { return 77; }
  uint64_t epoch() const override { return 1; }
  const Placement* placement(std::string_view, int32_t) const override { return nullptr; }
  Allocator* request_allocator() override { return allocator_; }
  absl::StatusOr<GroupStepResult> RunStep(GroupStep, bool, absl::Time) override {
    return absl::UnimplementedError("no step runs here");
  }

 private:
  Allocator* const allocator_;
};

struct StreamServerOptions {
  bool serving = true;             // else loading, until Serve
  std::unique_ptr<Router> router;  // null: the model's rule
  ForwardStreamLimits limits;
};

// The public service over a real socket, with a HeldController behind it.
class StreamServer {
 public:
  explicit StreamServer(StreamServerOptions options = {});
  // Lets go of all calls first.
  ~StreamServer();

  void Serve();
  ServingState& state() { return state_; }
  HeldController& controller() { return controller_; }
  ForwardStreamSet& streams() { return streams_; }
  OpenCalls& open_calls() { return open_calls_; }
  HostBufferPool& pool() { return pool_; }
  GrpcServer& server() { return *server_; }
  // expertmesh_calls_total; as `{code="OK",method="Forward"}`.
  int64_t CallsTotal(const std::string& labels) const;
  // Blocks until every stream has ended here too, whatever its client knows already.
  void AwaitStreamsEnd() { server_->Shutdown(absl::Now() + absl::Seconds(30)); }
  std::string target() const;
  std::unique_ptr<v1::ExpertService::Stub> NewStub() const;

  // The model served, and a message for it whose hidden states are of the stream_seq.
  const RequestTarget& model() const { return target_; }
  v1::ForwardStreamRequest Message(uint64_t stream_seq, int64_t num_tokens = 1) const;

 private:
  const RequestTarget target_{"tiny", 1, 0, 64, 5};
  ModelSpec model_;
  HostBufferPool pool_;
  HeldController controller_;
  AllocatingGroup group_{&pool_};
  RouterTable routers_;
  ForwardValidator validator_;
  MetricsRegistry registry_;
  const ServerMetrics metrics_{&registry_};
  ServingState state_{int64_t{1} << 30};
  ForwardStreamSet streams_;
  OpenCalls open_calls_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<GrpcServer> server_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RPC_FORWARD_STREAM_FIXTURE_H_
