// The Python module: weights, the ring and programs. Memory crosses as addresses of arrays that the caller keeps alive.
//
// Every call that computes or waits releases the GIL. Source: ours.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/dispatch.hpp"
#include "runner.hpp"

namespace nb = nanobind;
using namespace dlmrt::cpu;

namespace {

void* address(uint64_t value) { return reinterpret_cast<void*>(static_cast<uintptr_t>(value)); }

// (dtype, address, rows, ld, address of scales, address of block scales, global scale)
Source source_of(nb::handle item) {
  const auto t = nb::cast<nb::tuple>(item);
  Source s{};
  s.dtype = static_cast<DType>(nb::cast<int>(t[0]));
  s.data = address(nb::cast<uint64_t>(t[1]));
  s.rows = nb::cast<int64_t>(t[2]);
  s.ld = nb::cast<int64_t>(t[3]);
  s.scales = static_cast<const float*>(address(nb::cast<uint64_t>(t[4])));
  s.block_scales = static_cast<const uint8_t*>(address(nb::cast<uint64_t>(t[5])));
  s.global_scale = nb::cast<float>(t[6]);
  return s;
}

std::shared_ptr<PackedWeight> empty_weight(int dtype, int group, int64_t n, int64_t k, int64_t count) {
  return std::make_shared<PackedWeight>(static_cast<DType>(dtype), group, n, k, count);
}

void fill_weight(PackedWeight& weight, Pool& pool, int64_t index, const nb::list& sources) {
  std::vector<Source> list;
  for (nb::handle item : sources) list.push_back(source_of(item));
  const nb::gil_scoped_release release;
  weight.fill(pool, index, list);
}

// (address, bytes)
Memory memory_of(nb::handle value) {
  const auto [begin, bytes] = nb::cast<std::pair<uint64_t, int64_t>>(value);
  return {address(begin), bytes};
}

Fields fields_of(const std::string& op, const nb::dict& operands, const nb::dict& attributes) {
  Fields f;
  f.op = op;
  for (auto [key, value] : operands) {
    const auto role = nb::cast<std::string>(key);
    if (nb::isinstance<Ring>(value)) f.ring = nb::cast<std::shared_ptr<Ring>>(value);
    else if (nb::isinstance<PackedWeight>(value))
      f.weights.emplace_back(role, nb::cast<std::shared_ptr<PackedWeight>>(value));
    else f.memory.emplace_back(role, memory_of(value));
  }
  for (auto [key, value] : attributes) f.numbers.emplace_back(nb::cast<std::string>(key), nb::cast<double>(value));
  return f;
}

nb::list read_ring(Ring& ring, double seconds) {
  std::vector<std::string> records;
  {
    const nb::gil_scoped_release release;
    ring.read(seconds, [&](const uint8_t* slot) {
      records.emplace_back(reinterpret_cast<const char*>(slot), static_cast<size_t>(ring.slot_bytes()));
    });
  }
  nb::list out;
  for (const std::string& r : records) out.append(nb::bytes(r.data(), r.size()));
  return out;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels and program runner of dlmrt's cpu executor.";
  m.def("default_num_threads", &default_num_threads);
  m.def("runnable_instruction_sets", [] {
    std::vector<std::string> names;
    for (const KernelTable* t : runnable_kernels()) names.emplace_back(t->name);
    return names;
  });
  m.def("operand_bytes",
        [](int dtype, int64_t rows, int64_t width) { return operand_bytes(static_cast<DType>(dtype), rows, width); });
  m.def("weight_bytes", [](int dtype, int group, int64_t n, int64_t k, int64_t count) {
    return PackedWeight::num_bytes(static_cast<DType>(dtype), group, n, k, count);
  });
  m.def("expert_runs_bytes", &expert_runs_bytes);
  m.def("expert_rows", &expert_rows);
  m.def("kv_page_bytes", [](int dtype, int page_size, int num_kv_heads, int head_dim) {
    return kv_page_bytes({static_cast<DType>(dtype), page_size, num_kv_heads, head_dim, nullptr});
  });
  m.attr("HEAD_TILE") = kHeadTile;
  m.attr("ROW_GROUP") = kRowGroup;
  m.attr("IS_CHECKED") = kChecked;
  m.attr("GUMBEL_KEY_BYTES") = static_cast<int>(sizeof(GumbelKey));

  nb::class_<Pool>(m, "Pool").def(nb::init<int>()).def_prop_ro("size", &Pool::size);
  nb::class_<PackedWeight>(m, "PackedWeight");
  m.def("empty_weight", &empty_weight);
  m.def("fill_weight", &fill_weight);
  nb::class_<Ring>(m, "Ring")
      .def(nb::init<int, int64_t>())
      .def("reset", &Ring::reset)
      .def("read", &read_ring)
      .def("abandon", &Ring::abandon);
  nb::class_<Runner>(m, "Runner")
      .def("__init__", [](Runner* self, std::shared_ptr<Pool> pool,
                          const std::string& isa) { new (self) Runner(std::move(pool), select_kernels(isa)); })
      .def(
          "add",
          [](Runner& r, const std::string& op, const nb::dict& operands, const nb::dict& attributes,
             std::optional<int> span,
             bool waits) { r.add(fields_of(op, operands, attributes), span.value_or(-1), waits); },
          nb::arg("op"), nb::arg("operands"), nb::arg("attributes"), nb::arg("span") = nb::none(),
          nb::arg("waits") = false)
      .def("begin_while", [](Runner& r, nb::handle flag) { r.begin_while(memory_of(flag)); })
      .def("begin_if", [](Runner& r, nb::handle flag) { r.begin_if(memory_of(flag)); })
      .def("end", &Runner::end)
      .def_prop_ro("missing_scratch_bytes", &Runner::missing_scratch_bytes)
      .def("run", &Runner::run, nb::call_guard<nb::gil_scoped_release>())
      .def("start", &Runner::start, nb::call_guard<nb::gil_scoped_release>())
      .def("join", &Runner::join, nb::call_guard<nb::gil_scoped_release>())
      .def("check", &Runner::check);
  m.def("instruction_set", [](const std::string& name) { return std::string(select_kernels(name).name); });
}
