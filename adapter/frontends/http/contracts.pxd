cimport cython

from adapter.control.lease cimport Lease

cdef class ContainerContract:
    cdef public bint sends_again, renames
    cdef object _control, _status, _serving
    cdef bint _is_v2, _loads_for_calls
    cdef double _load_wait

    @cython.locals(lease=Lease)
    cpdef Lease lease(self, model_id, bint is_typed)
