/* A backend of Triton that holds HELD_MIB of GPU 0 in Triton's own process while a model is loaded,
   and reports them to Triton if REPORTS. It computes nothing. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
enum { UNSUPPORTED = 5, INTERNAL = 1, ON_GPU = 2 };

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONSERVER_BufferAttributes TRITONSERVER_BufferAttributes;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
extern TRITONSERVER_Error* TRITONSERVER_ErrorNew(int, const char*);
extern TRITONSERVER_Error* TRITONSERVER_BufferAttributesNew(TRITONSERVER_BufferAttributes**);
extern TRITONSERVER_Error* TRITONSERVER_BufferAttributesDelete(TRITONSERVER_BufferAttributes*);
extern TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetMemoryType(
    TRITONSERVER_BufferAttributes*, int);
extern TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetMemoryTypeId(
    TRITONSERVER_BufferAttributes*, int64_t);
extern TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetByteSize(
    TRITONSERVER_BufferAttributes*, size_t);
extern TRITONSERVER_Error* TRITONBACKEND_ModelReportMemoryUsage(
    TRITONBACKEND_Model*, TRITONSERVER_BufferAttributes**, uint32_t);
extern TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model*, void*);
extern TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model*, void**);

typedef unsigned long long Address;
static int (*take)(Address*, size_t);
static int (*give)(Address);

static int use_gpu(void)
{
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (cuda == NULL) return 0;
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
  int (*retain)(void**, int) = (int (*)(void**, int))dlsym(cuda, "cuDevicePrimaryCtxRetain");
  int (*use)(void*) = (int (*)(void*))dlsym(cuda, "cuCtxSetCurrent");
  take = (int (*)(Address*, size_t))dlsym(cuda, "cuMemAlloc_v2");
  give = (int (*)(Address))dlsym(cuda, "cuMemFree_v2");
  static void* context; /* kept: its memory is Triton's, not a model's */
  return init(0) == 0 && (context != NULL || retain(&context, 0) == 0) && use(context) == 0;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model)
{
  Address held = 0;
  if (!use_gpu()) return TRITONSERVER_ErrorNew(INTERNAL, "CUDA does not start");
  if (take(&held, (size_t)HELD_MIB << 20) != 0)
    return TRITONSERVER_ErrorNew(INTERNAL, "CUDA error: out of memory");
  TRITONBACKEND_ModelSetState(model, (void*)held);
  if (REPORTS) {
    TRITONSERVER_BufferAttributes* usage;
    TRITONSERVER_BufferAttributesNew(&usage);
    TRITONSERVER_BufferAttributesSetMemoryType(usage, ON_GPU);
    TRITONSERVER_BufferAttributesSetMemoryTypeId(usage, 0);
    TRITONSERVER_BufferAttributesSetByteSize(usage, (size_t)HELD_MIB << 20);
    TRITONSERVER_Error* error = TRITONBACKEND_ModelReportMemoryUsage(model, &usage, 1);
    TRITONSERVER_BufferAttributesDelete(usage);
    return error;
  }
  return NULL;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model)
{
  void* held = NULL;
  TRITONBACKEND_ModelState(model, &held);
  if (held != NULL && use_gpu()) give((Address)held);
  return NULL;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, unsigned number)
{
  return TRITONSERVER_ErrorNew(UNSUPPORTED, "it computes nothing");
}
