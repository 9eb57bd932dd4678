// llama.cpp as a benchmark runtime: one line of words in, one line of JSON out (benchmarks/child.py).
//
//   llama_driver run MODEL.gguf THREADS POSITIONS     then, on stdin:
//     forward ROWS CONTEXT N        seconds of one forward of ROWS tokens with all logits behind CONTEXT tokens, mean of N
//     answer REPEATS MAX N_END END... ID...   greedy decoding until an END id or MAX tokens: ids and seconds, each repeat
//   llama_driver quantize IN.gguf OUT.gguf q4_k_m|q4_0|q8_0|bf16 THREADS
//
// In C++, because calls from Python cost a small model 5-8 % of its time. The block attends causally: llama.cpp's own
// diffusion models differ in the mask, not in cost. Flash attention is off, which is faster here.
// Left out: sampling, batches of several sequences. Source: ours, over llama.h of llama-cpp-python 0.3.36.
#include <llama.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "llama_driver: %s\n", what);
  std::exit(1);
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Runtime {
 public:
  Runtime(const char* path, int threads, int positions) : random_(0) {
    llama_backend_init();
    model_ = llama_model_load_from_file(path, llama_model_default_params());
    if (model_ == nullptr) fail("cannot load the model");
    llama_context_params p = llama_context_default_params();
    p.n_ctx = static_cast<uint32_t>(positions);
    p.n_batch = p.n_ubatch = 512;
    p.n_threads = p.n_threads_batch = threads;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    context_ = llama_init_from_model(model_, p);
    if (context_ == nullptr) fail("cannot make a context");
    batch_ = llama_batch_init(512, 0, 1);
    vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
  }

  // Seconds of one forward, behind `context` committed tokens.
  double forward(int rows, int context, int count) {
    if (context != context_length_) {
      forget(0);
      extend(random_ids(context), 0, false);
      context_length_ = context;
    }
    double seconds = 0;
    for (int i = -1; i < count; i++) {  // the first one warms up
      const std::vector<llama_token> ids = random_ids(rows);
      const double began = now_s();
      extend(ids, context, true);
      if (i >= 0) seconds += now_s() - began;
      forget(context);
    }
    return seconds / count;
  }

  // Greedy answer; `ids` is its prompt.
  std::vector<llama_token> answer(const std::vector<llama_token>& ids, const std::vector<llama_token>& ends, int most) {
    context_length_ = -1;
    forget(0);
    extend(ids, 0, false);
    std::vector<llama_token> out;
    int position = static_cast<int>(ids.size());
    while (true) {
      out.push_back(best());
      bool is_end = static_cast<int>(out.size()) >= most;
      for (llama_token end : ends) is_end |= out.back() == end;
      if (is_end) return out;
      extend({out.back()}, position++, false);
    }
  }

 private:
  void extend(const std::vector<llama_token>& ids, int position, bool all_logits) {
    for (size_t begin = 0; begin < ids.size(); begin += 512) {
      const int count = static_cast<int>(std::min<size_t>(512, ids.size() - begin));
      batch_.n_tokens = count;
      for (int i = 0; i < count; i++) {
        batch_.token[i] = ids[begin + static_cast<size_t>(i)];
        batch_.pos[i] = position + static_cast<int>(begin) + i;
        batch_.n_seq_id[i] = 1;
        batch_.seq_id[i][0] = 0;
        batch_.logits[i] = all_logits || i == count - 1;
      }
      if (llama_decode(context_, batch_) != 0) fail("decode failed");
      llama_synchronize(context_);
    }
  }

  void forget(int from) { llama_memory_seq_rm(llama_get_memory(context_), 0, from, -1); }

  llama_token best() const {
    const float* logits = llama_get_logits_ith(context_, -1);
    llama_token best = 0;
    for (llama_token i = 1; i < vocab_; i++)
      if (logits[i] > logits[best]) best = i;
    return best;
  }

  std::vector<llama_token> random_ids(int count) {
    std::uniform_int_distribution<llama_token> id(0, vocab_ - 1);
    std::vector<llama_token> ids(static_cast<size_t>(count));
    for (llama_token& value : ids) value = id(random_);
    return ids;
  }

  llama_model* model_;
  llama_context* context_;
  llama_batch batch_;
  int vocab_;
  int context_length_ = -1;
  std::mt19937 random_;
};

template <class T>
std::string list(const std::vector<T>& values) {
  std::ostringstream out;
  out.precision(9);
  for (size_t i = 0; i < values.size(); i++) out << (i ? ", " : "") << values[i];
  return "[" + out.str() + "]";
}

void serve(Runtime& runtime) {
  std::cout << "{}" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name == "forward") {
      int rows, context, count;
      words >> rows >> context >> count;
      std::cout << "{\"value\": " << runtime.forward(rows, context, count) << "}" << std::endl;
    } else if (name == "answer") {
      int repeats, most, num_ends;
      words >> repeats >> most >> num_ends;
      std::vector<llama_token> ends(static_cast<size_t>(num_ends)), ids, out;
      for (llama_token& end : ends) words >> end;
      for (llama_token id; words >> id;) ids.push_back(id);
      std::vector<double> seconds;
      for (int i = 0; i < repeats; i++) {
        const double began = now_s();
        out = runtime.answer(ids, ends, most);
        seconds.push_back(now_s() - began);
      }
      std::cout << "{\"seconds\": " << list(seconds) << ", \"ids\": " << list(out) << "}" << std::endl;
    } else {
      fail("unknown request");
    }
  }
}

int quantize(const char* in, const char* out, const std::string& type, int threads) {
  llama_model_quantize_params p = llama_model_quantize_default_params();
  p.nthread = threads;
  p.allow_requantize = true;
  if (type == "q4_k_m") p.ftype = LLAMA_FTYPE_MOSTLY_Q4_K_M;
  else if (type == "q4_0") p.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
  else if (type == "q8_0") p.ftype = LLAMA_FTYPE_MOSTLY_Q8_0;
  else if (type == "bf16") p.ftype = LLAMA_FTYPE_MOSTLY_BF16;
  else fail("unknown type");
  return static_cast<int>(llama_model_quantize(in, out, &p));
}

}  // namespace

int main(int argc, char** argv) {
  llama_log_set([](ggml_log_level level, const char* text, void*) {
    if (level >= GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
  }, nullptr);
  if (argc == 6 && std::strcmp(argv[1], "quantize") == 0) return quantize(argv[2], argv[3], argv[4], std::atoi(argv[5]));
  if (argc != 5 || std::strcmp(argv[1], "run") != 0) fail("usage: run MODEL THREADS POSITIONS | quantize IN OUT TYPE THREADS");
  Runtime runtime(argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
  serve(runtime);
}
