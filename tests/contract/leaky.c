/* A backend of Triton that keeps KEPT_MIB of the server's heap each time a model is initialized,
   and fails every second time. It computes nothing. */
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { UNSUPPORTED = 5, INTERNAL = 1 };

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
extern TRITONSERVER_Error* TRITONSERVER_ErrorNew(int code, const char* text);

static unsigned count;
void* kept; /* the last of them, so that the compiler does not leave the memory out */

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model)
{
  if (KEPT_MIB > 0) {
    size_t size = (size_t)KEPT_MIB << 20;
    kept = malloc(size);
    memset(kept, 1, size);
    if (++count % 2 == 0) return TRITONSERVER_ErrorNew(INTERNAL, "it leaks, and fails");
  }
  return NULL;
}

EXPORT TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, unsigned number)
{
  return TRITONSERVER_ErrorNew(UNSUPPORTED, "it computes nothing");
}
