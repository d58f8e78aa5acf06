/* A thread that syncs files and never needs the interpreter.

   A Python thread has to take the interpreter's lock before and after every fdatasync, and each time it does so while
   the event loop runs the two wake each other several times: with many small rounds that costs more than the syncs.
   This thread waits for descriptors, syncs them, and makes a descriptor readable that the loop watches.

   One round at a time: `submit`, wait until `fileno()` is readable, `take`.  All methods are called by one thread.
   Linux only; without this module the broker does the same in Python (see rounds.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef __linux__
#error "eventfd is needed; the broker goes on without this module"
#endif

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define FILES_MAX 64

/* Who owns the round's fields: the caller, except while it is SUBMITTED. */
typedef enum { IDLE, SUBMITTED, DONE, CLOSING } State;

typedef struct {
    PyObject_HEAD
    pthread_t thread;
    int started;
    _Atomic int state;
    int wanted;   /* eventfd: the thread waits for it */
    int finished; /* eventfd: readable when a round is done */
    int count;
    int files[FILES_MAX];
    int errors[FILES_MAX]; /* errno of each, 0 if it is on disk */
    double seconds;
} Syncer;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void ring(int bell)
{
    uint64_t one = 1;
    while (write(bell, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Returns at once if the bell does not block, and rings no more. */
static void hear(int bell)
{
    uint64_t rings;
    while (read(bell, &rings, sizeof rings) < 0 && errno == EINTR)
        ;
}

static int sync_file(int file)
{
    while (fdatasync(file) != 0)
        if (errno != EINTR) /* interrupted before it did anything; any other error is final */
            return errno;
    return 0;
}

static void *work(void *argument)
{
    Syncer *self = argument;
    for (;;) {
        hear(self->wanted);
        int state = atomic_load(&self->state);
        if (state == CLOSING)
            return NULL;
        if (state != SUBMITTED)
            continue;
        double started = now();
        for (int place = 0; place < self->count; place++)
            self->errors[place] = sync_file(self->files[place]);
        self->seconds = now() - started;
        atomic_store(&self->state, DONE);
        ring(self->finished);
    }
}

static int start(Syncer *self)
{
    /* Signals are the interpreter's business, and it handles them in its main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int problem = pthread_create(&self->thread, NULL, work, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    self->started = problem == 0;
    return problem;
}

static PyObject *syncer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Syncer", names))
        return NULL;
    Syncer *self = (Syncer *)type->tp_alloc(type, 0); /* zeroed: IDLE, not started */
    if (self == NULL)
        return NULL;
    self->wanted = eventfd(0, EFD_CLOEXEC);
    self->finished = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int problem = self->wanted < 0 || self->finished < 0 ? errno : start(self);
    if (problem) {
        errno = problem;
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Let the round that is under way end, then the thread. */
static void stop(Syncer *self)
{
    if (self->started) {
        self->started = 0;
        Py_BEGIN_ALLOW_THREADS
        struct timespec moment = {0, 1000000};
        while (atomic_load(&self->state) == SUBMITTED)
            nanosleep(&moment, NULL);
        atomic_store(&self->state, CLOSING);
        ring(self->wanted);
        pthread_join(self->thread, NULL);
        Py_END_ALLOW_THREADS
    }
    if (self->wanted >= 0)
        close(self->wanted);
    if (self->finished >= 0)
        close(self->finished);
    self->wanted = self->finished = -1;
}

static void syncer_dealloc(Syncer *self)
{
    stop(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *syncer_submit(Syncer *self, PyObject *argument)
{
    PyObject *files = PySequence_Fast(argument, "submit takes a sequence of descriptors");
    if (files == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(files);
    int numbers[FILES_MAX];
    if (count > FILES_MAX) {
        PyErr_Format(PyExc_ValueError, "a round has %d files at most, not %zd", FILES_MAX, count);
        goto fail;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        long number = PyLong_AsLong(PySequence_Fast_GET_ITEM(files, place));
        if (number == -1 && PyErr_Occurred())
            goto fail;
        numbers[place] = (int)number; /* one that is not open is an error of the round, like any other */
    }
    if (atomic_load(&self->state) != IDLE || !self->started) {
        PyErr_SetString(PyExc_RuntimeError, "a round is under way, or the syncer is closed");
        goto fail;
    }
    for (Py_ssize_t place = 0; place < count; place++)
        self->files[place] = numbers[place];
    self->count = (int)count;
    atomic_store(&self->state, SUBMITTED);
    ring(self->wanted);
    Py_DECREF(files);
    Py_RETURN_NONE;
fail:
    Py_DECREF(files);
    return NULL;
}

static PyObject *syncer_take(Syncer *self, PyObject *Py_UNUSED(ignored))
{
    if (atomic_load(&self->state) != DONE || !self->started) {
        PyErr_SetString(PyExc_RuntimeError, "no round is done");
        return NULL;
    }
    hear(self->finished);
    atomic_store(&self->state, IDLE);
    PyObject *errors = PyList_New(self->count);
    if (errors == NULL)
        return NULL;
    for (int place = 0; place < self->count; place++) {
        PyObject *error = PyLong_FromLong(self->errors[place]);
        if (error == NULL) {
            Py_DECREF(errors);
            return NULL;
        }
        PyList_SET_ITEM(errors, place, error);
    }
    return Py_BuildValue("(dN)", self->seconds, errors);
}

static PyObject *syncer_fileno(Syncer *self, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLong(self->finished);
}

static PyObject *syncer_close(Syncer *self, PyObject *Py_UNUSED(ignored))
{
    stop(self);
    Py_RETURN_NONE;
}

static PyMethodDef syncer_methods[] = {
    {"submit", (PyCFunction)syncer_submit, METH_O, "Have these descriptors synced, in this order."},
    {"take", (PyCFunction)syncer_take, METH_NOARGS, "How long the round took, and the errno of each file or 0."},
    {"fileno", (PyCFunction)syncer_fileno, METH_NOARGS, "Readable when a round is done."},
    {"close", (PyCFunction)syncer_close, METH_NOARGS, "Wait for the round under way and end the thread."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject syncer_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "millstream.broker._syncer.Syncer",
    .tp_doc = "Syncs files in a thread that does not need the interpreter.",
    .tp_basicsize = sizeof(Syncer),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = syncer_new,
    .tp_dealloc = (destructor)syncer_dealloc,
    .tp_methods = syncer_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "millstream.broker._syncer",
    .m_doc = "Syncs files in a thread that does not need the interpreter.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__syncer(void)
{
    if (PyType_Ready(&syncer_type) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (self == NULL)
        return NULL;
    PyObject *files_max = PyLong_FromLong(FILES_MAX);
    if (files_max == NULL || PyModule_AddObjectRef(self, "Syncer", (PyObject *)&syncer_type) < 0
        || PyModule_AddObjectRef(self, "FILES_MAX", files_max) < 0) {
        Py_XDECREF(files_max);
        Py_DECREF(self);
        return NULL;
    }
    Py_DECREF(files_max);
    return self;
}
