#include <malloc.h>

#include "bindings/bindings.h"
#include "support/error.h"
#include "support/interrupt.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "Headrace's native core: kernels, expert memory, executor.";
  // Errors of the core become the package's own, so that one except clause serves both.
  nb::module_ errors = nb::module_::import_("headrace.errors");
  // Never released: the translator may run while the interpreter is being torn down.
  static PyObject* headrace_error = nb::object(errors.attr("HeadraceError")).release().ptr();
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const headrace::Error& e) {
      PyErr_SetString(headrace_error, e.what());
    }
  });
  m.def("exit_on_interrupt", &headrace::exit_on_interrupt, nb::arg("on"),
        "SIGINT ends the process at once with status 130 (on), or is Python's again (off).");
  m.def("release_free_memory", [] { malloc_trim(0); }, "Gives what the allocator keeps for later back to the system.");
  headrace::init_kernels(m);
  headrace::init_experts(m);
  headrace::init_simulator(m);
  headrace::init_pipeline_model(m);
  headrace::init_executor(m);
}
