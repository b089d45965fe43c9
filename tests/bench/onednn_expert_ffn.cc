#include "tests/bench/onednn_expert_ffn.h"

#include <omp.h>

#include <algorithm>
#include <dnnl.hpp>
#include <map>
#include <utility>

#include "tests/bench/roofline_avx512_bf16.h"

namespace expertmesh {

using DnnlType = dnnl::memory::data_type;
using DnnlTag = dnnl::memory::format_tag;

struct OneDnnExpertFfn::State {
  struct Product {
    dnnl::matmul::primitive_desc description;
    dnnl::matmul primitive;
  };
  struct Worker {
    dnnl::stream stream;
    std::vector<float> gate_up;
    std::vector<uint16_t> intermediate;
    std::vector<std::byte> scratchpad;
  };

  int64_t hidden_size;
  int64_t intermediate_size;
  ParallelFor* parallel_for;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::memory::desc gate_up_format, down_format;
  std::vector<dnnl::memory> gate_up, down;                  // by expert
  std::map<int64_t, std::pair<Product, Product>> products;  // by number of rows
  std::vector<Worker> workers;

  Product MakeProduct(int64_t rows, int64_t depth, int64_t columns, DnnlType output_type,
                      const dnnl::memory::desc& weights) const {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const dnnl::matmul::desc description(
        dnnl::memory::desc({rows, depth}, DnnlType::bf16, DnnlTag::ab), weights,
        dnnl::memory::desc({rows, columns}, output_type, DnnlTag::ab));
    const dnnl::matmul::primitive_desc primitive(description, attributes, engine);
    return {primitive, dnnl::matmul(primitive)};
  }

  // The format that oneDNN asks for with a typical number of rows, and the weights in it for every
  // expert. `source` is [columns, depth].
  std::vector<dnnl::memory> Reorder(int num_experts, int64_t depth, int64_t columns,
                                    const uint16_t* source, dnnl::memory::desc* format) {
    const dnnl::memory::desc any({depth, columns}, DnnlType::bf16, DnnlTag::any);
    *format = MakeProduct(16, depth, columns, DnnlType::f32, any).description.weights_desc();
    dnnl::memory plain({{depth, columns}, DnnlType::bf16, DnnlTag::ba}, engine,
                       const_cast<uint16_t*>(source));
    std::vector<dnnl::memory> experts;
    dnnl::stream stream(engine);
    for (int e = 0; e < num_experts; ++e) {
      experts.emplace_back(*format, engine);
      dnnl::reorder(plain, experts.back()).execute(stream, plain, experts.back());
    }
    stream.wait();
    return experts;
  }

  static void Execute(Worker& worker, const dnnl::engine& engine, const Product& product,
                      const void* rows, const dnnl::memory& weights, void* output) {
    const dnnl::memory::desc scratchpad = product.description.scratchpad_desc();
    if (worker.scratchpad.size() < scratchpad.get_size()) {
      worker.scratchpad.resize(scratchpad.get_size());
    }
    product.primitive.execute(
        worker.stream,
        {{DNNL_ARG_SRC,
          dnnl::memory(product.description.src_desc(), engine, const_cast<void*>(rows))},
         {DNNL_ARG_WEIGHTS, weights},
         {DNNL_ARG_DST, dnnl::memory(product.description.dst_desc(), engine, output)},
         {DNNL_ARG_SCRATCHPAD, dnnl::memory(scratchpad, engine, worker.scratchpad.data())}});
  }
};

OneDnnExpertFfn::OneDnnExpertFfn(int num_experts, int64_t hidden_size, int64_t intermediate_size,
                                 const uint16_t* gate_up, const uint16_t* down,
                                 ParallelFor* parallel_for)
    : state_(std::make_unique<State>()) {
  state_->hidden_size = hidden_size;
  state_->intermediate_size = intermediate_size;
  state_->parallel_for = parallel_for;
  state_->gate_up = state_->Reorder(num_experts, hidden_size, 2 * intermediate_size, gate_up,
                                    &state_->gate_up_format);
  state_->down =
      state_->Reorder(num_experts, intermediate_size, hidden_size, down, &state_->down_format);
  for (int worker = 0; worker < parallel_for->num_threads(); ++worker) {
    state_->workers.push_back({dnnl::stream(state_->engine), {}, {}, {}});
  }
}

OneDnnExpertFfn::~OneDnnExpertFfn() = default;

void OneDnnExpertFfn::Prepare(int64_t num_rows) {
  if (num_rows == 0 || state_->products.count(num_rows) != 0) return;
  state_->products.emplace(
      num_rows,
      std::pair(state_->MakeProduct(num_rows, state_->hidden_size, 2 * state_->intermediate_size,
                                    DnnlType::f32, state_->gate_up_format),
                state_->MakeProduct(num_rows, state_->intermediate_size, state_->hidden_size,
                                    DnnlType::f32, state_->down_format)));
}

void OneDnnExpertFfn::Run(const std::vector<int64_t>& offsets, const uint16_t* rows,
                          float* output) {
  State& state = *state_;
  std::vector<int64_t> experts;
  for (int64_t e = 0; e + 1 < static_cast<int64_t>(offsets.size()); ++e) {
    const size_t i = static_cast<size_t>(e);
    if (offsets[i + 1] == offsets[i]) continue;
    experts.push_back(e);
    Prepare(offsets[i + 1] - offsets[i]);
  }
  const auto num_rows = [&offsets](int64_t e) {
    return offsets[static_cast<size_t>(e) + 1] - offsets[static_cast<size_t>(e)];
  };
  std::stable_sort(experts.begin(), experts.end(),
                   [&](int64_t a, int64_t b) { return num_rows(a) > num_rows(b); });
  state.parallel_for->Run(
      static_cast<int64_t>(experts.size()), 1e6, [&](int64_t task, int worker_index) {
        omp_set_num_threads(1);
        State::Worker& worker = state.workers[static_cast<size_t>(worker_index)];
        const int64_t expert = experts[static_cast<size_t>(task)];
        const size_t e = static_cast<size_t>(expert);
        const int64_t n = num_rows(expert);
        const int64_t i = state.intermediate_size;
        worker.gate_up.resize(std::max(worker.gate_up.size(), static_cast<size_t>(n * 2 * i)));
        worker.intermediate.resize(
            std::max(worker.intermediate.size(), static_cast<size_t>(n * i)));
        const std::pair<State::Product, State::Product>& products = state.products.at(n);
        State::Execute(worker, state.engine, products.first, rows + offsets[e] * state.hidden_size,
                       state.gate_up[e], worker.gate_up.data());
        for (int64_t row = 0; row < n; ++row) {
          SiluMul(worker.gate_up.data() + row * 2 * i, i, worker.intermediate.data() + row * i);
        }
        State::Execute(worker, state.engine, products.second, worker.intermediate.data(),
                       state.down[e], output + offsets[e] * state.hidden_size);
      });
}

}  // namespace expertmesh
