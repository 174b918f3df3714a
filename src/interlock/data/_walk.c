/* One walk over JSON data: held against a shape, copied, and written in canonical form, all at once.

   The package can do the same with orjson, a validator and Python; this does it three times sooner. It only ever says
   yes: whatever is not plain about a value (a type that JSON does not have, a number beyond 64 bits, a text that is not
   in Unicode's NFC, anything that does not fit) is answered with None, and then looked at by those who can say what is
   wrong with it.

   INVARIANT: where a container is copied, only the copy is read. Nobody else has that, so whatever runs meanwhile (to
   make a container may start a collection, and that may run finalizers) does not change it, and what was checked and
   written is what is handed on. Where nothing is copied, nothing is made that could start a collection. (Who searches
   the collector's objects for the copy, to change it, is in this process already and needs no such thing.) */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Deeper values and larger rows are left to others. */
#define DEEPEST 50
#define MEMBERS 64

/* What a shape says */

/* An open row may have members besides those that are named. It can be checked, and no more than that. */
enum { ANY, TEXT, WHOLE, REAL, NUMBER, TRUTH, NOTHING, CHOICE, LIST, MAP, ROW, OPEN };

static const char *const KINDS[] = {"any",    "text", "whole", "real", "number", "truth", "nothing",
                                    "choice", "list", "map",   "row",  "open",   NULL};

typedef struct node {
    int kind;
    int nullable;
    PyObject *choices;      /* of a CHOICE: a frozenset of texts */
    struct node *each;      /* of a LIST or a MAP */
    struct member *members; /* of a row, in the order of their names */
    struct seen *seen;      /* of a row: which of them came first in the last one, and so on; one for all beyond them */
    Py_ssize_t count;
} node;

typedef struct member {
    PyObject *name;
    char *text; /* the name as JSON, between a comma and a colon; eight bytes longer than it is */
    Py_ssize_t size;
    int required;
    node node;
} member;

/* A name as it was given. It is held, so that another object cannot take its place in memory and pass for it. */
typedef struct seen {
    PyObject *name;
    Py_ssize_t member;
} seen;

static const node ANYTHING = {ANY, 0, NULL, NULL, NULL, NULL, 0};

/* What is written */

#define FEW 16
#define LEVELS 6
#define LONG_RUN 32
#define LONG_TEXT 32768

/* The names of the last small object at some depth, as they came, and how they are put in order. That object is still
   there while the walk lasts, so names that are the same objects are the same names. */
typedef struct {
    Py_ssize_t count;
    PyObject *names[FEW];
    unsigned char order[FEW];
} remembered;

typedef struct {
    int writing, copying;
    Py_ssize_t left; /* how much may still be looked at: one for each value, and the bytes of texts */
    PyObject *bytes;
    char *at, *end;
    remembered last[LEVELS];
} walker;

static PyObject *orjson_dumps, *is_normalized, *nfc;

static int grow(walker *w, Py_ssize_t more) {
    Py_ssize_t used = w->at - PyBytes_AS_STRING(w->bytes), size = PyBytes_GET_SIZE(w->bytes);
    if (more > PY_SSIZE_T_MAX / 4 - size) {
        PyErr_NoMemory();
        return -1;
    }
    if (_PyBytes_Resize(&w->bytes, 2 * size + more) < 0) {
        return -1;
    }
    w->at = PyBytes_AS_STRING(w->bytes) + used;
    w->end = PyBytes_AS_STRING(w->bytes) + PyBytes_GET_SIZE(w->bytes);
    return 0;
}

static inline int room(walker *w, Py_ssize_t more) {
    return w->end - w->at >= more ? 0 : grow(w, more);
}

static inline int put(walker *w, const char *text, Py_ssize_t size) {
    if (room(w, size) < 0) {
        return -1;
    }
    memcpy(w->at, text, (size_t)size);
    w->at += size;
    return 0;
}

static inline int put_char(walker *w, char c) {
    if (room(w, 1) < 0) {
        return -1;
    }
    *w->at++ = c;
    return 0;
}

/* What stands between values, where anything is written at all. */
static inline int mark(walker *w, char c) {
    return w->writing ? put_char(w, c) : 0;
}

/* Copies eight bytes, and tells whether one of them is one that JSON escapes: below a blank, a quote, a backslash. */
static inline int copy_word(char *to, const char *from) {
    const uint64_t ones = 0x0101010101010101u, highs = 0x8080808080808080u;
    uint64_t word, quote, slash;
    memcpy(&word, from, 8);
    memcpy(to, &word, 8);
    quote = word ^ (ones * '"');
    slash = word ^ (ones * '\\');
    return ((((word - ones * ' ') & ~word) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash)) & highs) != 0;
}

static inline int is_escape(unsigned char c) {
    return c < ' ' || c == '"' || c == '\\';
}

/* As much of a text as needs no escape. There must be room for all of it, and for eight bytes more. */
static inline const char *put_run(walker *w, const char *text, const char *end) {
    char *at = w->at;
    while (end - text >= 8 && !copy_word(at, text)) {
        text += 8;
        at += 8;
    }
    while (text < end && !is_escape((unsigned char)*text)) {
        *at++ = *text++;
    }
    w->at = at;
    return text;
}

/* The rest of a text, from a character to be escaped. */
static int put_escaped(walker *w, const char *text, const char *end) {
    static const char SHORT[] = "\bb\tt\nn\ff\rr";
    while (text < end) {
        const char *known;
        if (room(w, end - text + 16) < 0) {
            return -1;
        }
        unsigned char c = (unsigned char)*text++;
        *w->at++ = '\\';
        if (c >= ' ') {
            *w->at++ = (char)c;
        } else if (c && (known = strchr(SHORT, c)) != NULL) {
            *w->at++ = known[1];
        } else {
            w->at += sprintf(w->at, "u%04x", c);
        }
        text = put_run(w, text, end);
    }
    return 0;
}

/* Whether is_normalized() may take long for a text: it takes a quadratic time to sort a long run of combining marks, and
   holds up all threads meanwhile. nfc.py, which has the same ranges, does such a text in pieces. */
static int may_be_slow(PyObject *text) {
    const void *data = PyUnicode_DATA(text);
    Py_ssize_t length = PyUnicode_GET_LENGTH(text), run = 0;
    int kind = PyUnicode_KIND(text);
    if (kind == PyUnicode_1BYTE_KIND || length <= LONG_RUN) {
        return 0;
    }
    if (length > LONG_TEXT) {
        return 1;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        Py_UCS4 c = PyUnicode_READ(kind, data, i);
        int loose = c >= 0x300 && (c <= 0x36f || (c >= 0x483 && c <= 0x1dff) || (c >= 0x20d0 && c <= 0x20ff) ||
                                   (c >= 0x2cef && c <= 0x33ff) || (c >= 0xa66f && c <= 0xabff) ||
                                   (c >= 0xfb1e && c <= 0xfe2f) || c > 0xffff);
        run = loose ? run + 1 : 0;
        if (run > LONG_RUN) {
            return 1;
        }
    }
    return 0;
}

static int put_text(walker *w, PyObject *text) {
    const char *data, *rest;
    Py_ssize_t size;
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        data = PyUnicode_DATA(text);
        size = PyUnicode_GET_LENGTH(text);
    } else if ((data = PyUnicode_AsUTF8AndSize(text, &size)) == NULL) {
        return -1; /* it has a lone surrogate */
    }
    if ((w->left -= size + 1) < 0) {
        return -1;
    }
    if (!w->writing) {
        return 0;
    }
    if (!PyUnicode_IS_ASCII(text)) {
        if (may_be_slow(text)) {
            return -1;
        }
        PyObject *given[] = {nfc, text}, *normal = PyObject_Vectorcall(is_normalized, given, 2, NULL);
        Py_XDECREF(normal);
        if (normal != Py_True) {
            return -1;
        }
    }
    if (room(w, size + 16) < 0) {
        return -1;
    }
    *w->at++ = '"';
    rest = put_run(w, data, data + size);
    return rest < data + size && put_escaped(w, rest, data + size) < 0 ? -1 : put_char(w, '"');
}

/* The digits of a whole number, and noughts before them if it has fewer than it should. */
static int put_digits(walker *w, uint64_t number, int least) {
    char digits[24], *at = digits + sizeof(digits);
    do {
        *--at = (char)('0' + number % 10);
        number /= 10;
        least--;
    } while (number || least > 0);
    return put(w, at, digits + sizeof(digits) - at);
}

static int put_whole(walker *w, long long number) {
    if (number < 0 && put_char(w, '-') < 0) {
        return -1;
    }
    return put_digits(w, number < 0 ? 0 - (uint64_t)number : (uint64_t)number, 1);
}

static int put_real(walker *w, PyObject *value) {
    static const double TENS[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8};
    double number = PyFloat_AS_DOUBLE(value), size = fabs(number);
    if (!isfinite(number)) {
        return -1;
    }
    if (!w->writing) {
        return 0;
    }
    if (number == floor(number)) {
        return size < 9e18 ? put_whole(w, (long long)number) : -1; /* 1.0 and 1 are one number */
    }
    /* Of all decimals of up to 15 digits at most one is read as this number, so the first that is, is the shortest. To
       divide two numbers that are exact is as exact as to read the decimal (where doubles are computed as doubles). */
    for (int places = 1; FLT_EVAL_METHOD == 0 && places <= 8 && size >= 1e-3; places++) {
        double shifted = rint(size * TENS[places]);
        if (shifted >= 1e15) {
            break;
        }
        if (shifted / TENS[places] == size) {
            uint64_t digits = (uint64_t)shifted, ten = (uint64_t)TENS[places];
            if ((number < 0 && put_char(w, '-') < 0) || put_digits(w, digits / ten, 1) < 0 || put_char(w, '.') < 0) {
                return -1;
            }
            return put_digits(w, digits % ten, places);
        }
    }
    PyObject *spelt = PyObject_CallOneArg(orjson_dumps, value);
    int done = spelt == NULL ? -1 : put(w, PyBytes_AS_STRING(spelt), PyBytes_GET_SIZE(spelt));
    Py_XDECREF(spelt);
    return done;
}

/* The walk. What takes a value's place in the copy is put in `made`, as a reference of its own. */

static int walk(walker *w, const node *shape, PyObject *value, PyObject **made, int depth);

static int walk_whole(walker *w, const node *shape, PyObject *value, PyObject **made) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow || (number == -1 && PyErr_Occurred())) {
        return -1;
    }
    if (shape->kind == REAL && w->copying) {
        if (number > 1LL << 53 || number < -(1LL << 53) || (*made = PyFloat_FromDouble((double)number)) == NULL) {
            return -1;
        }
    }
    return w->writing ? put_whole(w, number) : 0;
}

/* A container as the walk may read it: one of its own if a copy is made. NULL where it holds too much. */
static PyObject *own_list(const walker *w, PyObject *value) {
    Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    if (size > w->left) {
        return NULL;
    }
    if (!w->copying) {
        return Py_NewRef(value);
    }
    PyObject *own = PyList_New(size);
    if (own == NULL || PySequence_Fast_GET_SIZE(value) != size) {
        Py_CLEAR(own); /* it was changed by a finalizer: PyList_GetSlice would go on, and read what is not there */
    }
    for (Py_ssize_t i = 0; own != NULL && i < size; i++) {
        PyList_SET_ITEM(own, i, Py_NewRef(PySequence_Fast_GET_ITEM(value, i)));
    }
    return own;
}

static PyObject *own_dict(const walker *w, PyObject *value) {
    if (PyDict_GET_SIZE(value) > w->left) {
        return NULL;
    }
    if (!w->copying) {
        return Py_NewRef(value);
    }
    /* First made, then filled: PyDict_Copy reads on after what it makes may have let a finalizer change the other. */
    PyObject *own = PyDict_New();
    if (own != NULL && PyDict_Update(own, value) < 0) {
        Py_CLEAR(own);
    }
    return own;
}

/* What to answer once a container was walked, or could not be. */
static int walked(const walker *w, PyObject *own, PyObject **made, int done) {
    if (w->copying && done == 0) {
        *made = own;
    } else {
        Py_XDECREF(own);
    }
    return done;
}

static int walk_list(walker *w, const node *each, PyObject *value, PyObject **made, int depth) {
    PyObject *own = own_list(w, value);
    int done = own == NULL ? -1 : mark(w, '[');
    for (Py_ssize_t i = 0; done == 0 && i < PySequence_Fast_GET_SIZE(own); i++) {
        PyObject *new = NULL;
        done = i && mark(w, ',') < 0 ? -1 : walk(w, each, PySequence_Fast_GET_ITEM(own, i), &new, depth);
        if (new != NULL && done == 0) {
            done = PyList_SetItem(own, i, new);
        } else {
            Py_XDECREF(new);
        }
    }
    return walked(w, own, made, done < 0 ? -1 : mark(w, ']'));
}

/* A member of an object that, where a copy is made, is the walk's own. */
static inline int walk_member(walker *w, const node *shape, PyObject *own, PyObject *name, PyObject *item, int depth) {
    PyObject *new = NULL;
    int done = walk(w, shape, item, &new, depth);
    if (new != NULL) {
        done = done < 0 ? -1 : PyDict_SetItem(own, name, new);
        Py_DECREF(new);
    }
    return done;
}

typedef struct {
    PyObject *name, *item;
    const char *text;
    Py_ssize_t size;
} entry;

static int compare(const void *one, const void *other) {
    const entry *a = one, *b = other;
    int order = memcmp(a->text, b->text, (size_t)(a->size < b->size ? a->size : b->size));
    return order ? order : (a->size > b->size) - (a->size < b->size);
}

/* Reads a name; the order of code points is that of the bytes they are written with. */
static int read_name(entry *it) {
    return PyUnicode_CheckExact(it->name) && (it->text = PyUnicode_AsUTF8AndSize(it->name, &it->size)) != NULL ? 0 : -1;
}

/* The members of an object in the order of their names. */
static int sorted_members(PyObject *own, entry *members) {
    Py_ssize_t at = 0;
    entry *new = members;
    while (PyDict_Next(own, &at, &new->name, &new->item)) {
        if (read_name(new++) < 0) {
            return -1;
        }
    }
    qsort(members, (size_t)(new - members), sizeof(entry), compare);
    return 0;
}

/* The same of a few, which is done sooner where the names are those of the last such object. */
static int few_members(PyObject *own, entry *members, remembered *last) {
    Py_ssize_t at = 0, n = 0, count = PyDict_GET_SIZE(own);
    PyObject *names[FEW], *items[FEW];
    int same = count == last->count;
    for (; n < count && PyDict_Next(own, &at, &names[n], &items[n]); n++) {
        same = same && names[n] == last->names[n];
    }
    if (!same) {
        last->count = -1;
        for (n = 0; n < count; n++) {
            entry new = {names[n], items[n], NULL, 0};
            if (read_name(&new) < 0) {
                return -1;
            }
            for (at = n; at > 0 && compare(&members[at - 1], &new) > 0; at--) {
                members[at] = members[at - 1];
                last->order[at] = last->order[at - 1];
            }
            members[at] = new;
            last->order[at] = (unsigned char)n;
            last->names[n] = names[n];
        }
        last->count = count;
    }
    for (n = 0; n < count; n++) {
        members[n].name = names[last->order[n]];
        members[n].item = items[last->order[n]];
    }
    return 0;
}

static int walk_members(walker *w, const node *each, PyObject *own, entry *members, Py_ssize_t count, int depth) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if ((i && mark(w, ',') < 0) || put_text(w, members[i].name) < 0 || mark(w, ':') < 0 ||
            walk_member(w, each, own, members[i].name, members[i].item, depth) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A member whose name is only looked at. */
static int walk_unwritten(walker *w, const node *each, PyObject *own, PyObject *name, PyObject *item, int depth) {
    entry it = {name, item, NULL, 0};
    return read_name(&it) < 0 || (w->left -= it.size) < 0 ? -1 : walk_member(w, each, own, name, item, depth);
}

static int walk_map(walker *w, const node *each, PyObject *value, PyObject **made, int depth) {
    entry few[FEW];
    PyObject *name, *item, *own = own_dict(w, value);
    Py_ssize_t at = 0, count = own == NULL ? 0 : PyDict_GET_SIZE(own);
    int done = own == NULL ? -1 : mark(w, '{');
    if (done == 0 && !w->writing) {
        while (done == 0 && PyDict_Next(own, &at, &name, &item)) {
            done = walk_unwritten(w, each, own, name, item, depth);
        }
    } else if (done == 0 && count <= FEW && depth < LEVELS) {
        done = few_members(own, few, &w->last[depth]) < 0 ? -1 : walk_members(w, each, own, few, count, depth);
    } else if (done == 0) {
        entry *members = PyMem_New(entry, (size_t)count + 1);
        if (members == NULL) {
            PyErr_NoMemory();
        }
        done = members == NULL || sorted_members(own, members) < 0 ? -1 : walk_members(w, each, own, members, count, depth);
        PyMem_Free(members);
    }
    return walked(w, own, made, done < 0 ? -1 : mark(w, '}'));
}

/* Which member of a row a name is, and -1 for none; looked up if another name came in this place the last time. */
static inline Py_ssize_t member_at(const node *shape, PyObject *name, Py_ssize_t place) {
    seen *it = &shape->seen[place < shape->count ? place : shape->count];
    if (it->name == name) {
        return it->member;
    }
    for (Py_ssize_t i = 0; i < shape->count && PyUnicode_CheckExact(name); i++) {
        if (PyUnicode_Compare(name, shape->members[i].name) == 0) {
            Py_XSETREF(it->name, Py_NewRef(name));
            return it->member = i;
        }
    }
    return -1;
}

/* A name that is at hand as it is written. */
static inline int put_name(walker *w, const member *one, int first) {
    if (room(w, one->size + 8) < 0) {
        return -1;
    }
    for (Py_ssize_t i = first; i < one->size; i += 8) {
        memcpy(w->at + i - first, one->text + i, 8);
    }
    w->at += one->size - first;
    return 0;
}

static int walk_row(walker *w, const node *shape, PyObject *value, PyObject **made, int depth) {
    PyObject *items[MEMBERS], *name, *item, *own = own_dict(w, value);
    Py_ssize_t at = 0, place = 0, written = 0;
    int open = shape->kind == OPEN;
    int done = own == NULL || (!open && PyDict_GET_SIZE(own) > shape->count) ? -1 : mark(w, '{');
    memset(items, 0, (size_t)shape->count * sizeof(PyObject *));
    while (done == 0 && PyDict_Next(own, &at, &name, &item)) {
        Py_ssize_t which = member_at(shape, name, place++);
        if (which >= 0) {
            items[which] = item;
        } else {
            done = open ? walk_unwritten(w, &ANYTHING, own, name, item, depth) : -1;
        }
    }
    for (Py_ssize_t i = 0; done == 0 && i < shape->count; i++) {
        const member *one = &shape->members[i];
        if (items[i] == NULL) {
            done = one->required ? -1 : 0;
        } else if (w->writing && put_name(w, one, !written++) < 0) {
            done = -1;
        } else if (one->node.kind == TEXT && PyUnicode_CheckExact(items[i])) {
            done = put_text(w, items[i]);
        } else {
            done = walk_member(w, &one->node, own, one->name, items[i], depth);
        }
    }
    return walked(w, own, made, done < 0 ? -1 : mark(w, '}'));
}

static int walk(walker *w, const node *shape, PyObject *value, PyObject **made, int depth) {
    PyTypeObject *type = Py_TYPE(value);
    int kind = shape->kind, any = kind == ANY;
    if (--w->left < 0) {
        return -1;
    }
    if (type == &PyUnicode_Type) {
        int fits = kind == CHOICE ? PySet_Contains(shape->choices, value) == 1 : any || kind == TEXT;
        return fits ? put_text(w, value) : -1;
    }
    if (type == &PyLong_Type) {
        return any || kind == WHOLE || kind == REAL || kind == NUMBER ? walk_whole(w, shape, value, made) : -1;
    }
    if (type == &PyFloat_Type) {
        return any || kind == REAL || kind == NUMBER ? put_real(w, value) : -1;
    }
    if (value == Py_None) {
        if (!any && kind != NOTHING && !shape->nullable) {
            return -1;
        }
        return w->writing ? put(w, "null", 4) : 0;
    }
    if (type == &PyBool_Type) {
        if (!any && kind != TRUTH) {
            return -1;
        }
        return !w->writing ? 0 : value == Py_True ? put(w, "true", 4) : put(w, "false", 5);
    }
    if (depth == DEEPEST) {
        return -1;
    }
    if (type == &PyDict_Type && (kind == ROW || (kind == OPEN && !w->writing && !w->copying))) {
        return walk_row(w, shape, value, made, depth + 1);
    }
    if (type == &PyDict_Type && (any || kind == MAP)) {
        return walk_map(w, any ? shape : shape->each, value, made, depth + 1);
    }
    /* What a tool is given for a tuple is not for a shape to say. */
    if ((type == &PyList_Type && (any || kind == LIST)) || (type == &PyTuple_Type && any && !(w->writing && w->copying))) {
        return walk_list(w, any ? shape : shape->each, value, made, depth + 1);
    }
    return -1;
}

/* Walks from the top. Answers 1 for yes, 0 for what is not plain, -1 with an error set if there is no memory. */
static int begin(walker *w, const node *shape, PyObject *value, PyObject **made, Py_ssize_t size) {
    w->bytes = NULL;
    for (int i = 0; i < LEVELS; i++) {
        w->last[i].count = -1;
    }
    if (w->writing) {
        if ((w->bytes = PyBytes_FromStringAndSize(NULL, size)) == NULL) {
            return -1;
        }
        w->at = PyBytes_AS_STRING(w->bytes);
        w->end = w->at + size;
    }
    if (walk(w, shape, value, made, 0) == 0) {
        if (w->writing && _PyBytes_Resize(&w->bytes, w->at - PyBytes_AS_STRING(w->bytes)) < 0) {
            Py_CLEAR(*made);
            return -1;
        }
        return 1;
    }
    Py_CLEAR(*made);
    Py_CLEAR(w->bytes);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

static PyObject *answer(int walked, PyObject *yes) {
    return walked > 0 ? yes : walked < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *canonical(PyObject *Py_UNUSED(module), PyObject *value) {
    walker w;
    PyObject *made = NULL;
    w.writing = 1;
    w.copying = 0;
    w.left = PY_SSIZE_T_MAX;
    int walked = begin(&w, &ANYTHING, value, &made, 256);
    return answer(walked, w.bytes);
}

static PyObject *copied(PyObject *Py_UNUSED(module), PyObject *value) {
    walker w;
    PyObject *made = NULL;
    w.writing = 0;
    w.copying = 1;
    w.left = PY_SSIZE_T_MAX;
    int walked = begin(&w, &ANYTHING, value, &made, 0);
    return answer(walked, made != NULL ? made : walked > 0 ? Py_NewRef(value) : NULL);
}

/* Whether there is anything from `0` to `@` among eight characters of ASCII. */
static inline int has_digit_or_at(const char *text) {
    const uint64_t ones = 0x0101010101010101u, highs = 0x8080808080808080u;
    uint64_t word;
    memcpy(&word, text, 8);
    return ((word + ones * (0x80 - '0')) & ~(word + ones * (0x80 - '@' - 1)) & highs) != 0;
}

/* Whether anything private may be found in a text. None of the patterns matches without an `@` or four digits. */
static int may_be_private(PyObject *text) {
    if (!PyUnicode_IS_COMPACT_ASCII(text)) {
        return 1;
    }
    const char *data = PyUnicode_DATA(text), *end = data + PyUnicode_GET_LENGTH(text);
    for (int digits = 0; data < end;) {
        if (end - data >= 8 && !has_digit_or_at(data)) {
            data += 8;
        } else if (*data == '@' || (*data >= '0' && *data <= '9' && ++digits == 4)) {
            return 1;
        } else {
            data++;
        }
    }
    return 0;
}

/* The same way through data, to see what is in it: whether all names are among those that are known, and which texts
   should be searched. Answers 1 for yes, 0 for what is not plain, -1 with an error set. Nothing is made on the way. */
static int gather(PyObject *value, PyObject *known, PyObject *texts, int depth) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyUnicode_Type) {
        return may_be_private(value) && PyList_Append(texts, value) < 0 ? -1 : 1;
    }
    if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || value == Py_None) {
        return 1;
    }
    int yes = depth < DEEPEST;
    if (type == &PyDict_Type) {
        PyObject *name, *item;
        Py_ssize_t at = 0;
        while (yes > 0 && PyDict_Next(value, &at, &name, &item)) {
            Py_INCREF(name); /* to look for it may run whatever the set holds */
            Py_INCREF(item);
            yes = PyUnicode_CheckExact(name) ? PySet_Contains(known, name) : 0;
            yes = yes > 0 ? gather(item, known, texts, depth + 1) : yes;
            Py_DECREF(item);
            Py_DECREF(name);
        }
        return yes;
    }
    if (type == &PyList_Type || type == &PyTuple_Type) {
        for (Py_ssize_t i = 0; yes > 0 && i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            yes = gather(item, known, texts, depth + 1);
            Py_DECREF(item);
        }
        return yes;
    }
    return 0;
}

static PyObject *gathered(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *value, *known, *texts;
    if (!PyArg_ParseTuple(args, "OO!O!:gathered", &value, &PySet_Type, &known, &PyList_Type, &texts)) {
        return NULL;
    }
    int yes = gather(value, known, texts, 0);
    return yes < 0 ? NULL : PyBool_FromLong(yes);
}

/* The same way once more, to add up the least number of bytes that data takes as JSON. Answers 1 for yes, 0 for what is
   not plain. It is over as soon as there are more than `most`, so that large data costs no more than that. */
static int measure(PyObject *value, Py_ssize_t *size, Py_ssize_t most, int depth) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyUnicode_Type) {
        *size += PyUnicode_GET_LENGTH(value) + 2;
        return 1;
    }
    if (type == &PyLong_Type) {
        Py_ssize_t digits = Py_ABS(Py_SIZE(value)); /* each but the first stands for nine decimal ones at least */
        *size += digits < 2 ? 1 : digits * 9 - 8;
        return 1;
    }
    if (type == &PyFloat_Type || type == &PyBool_Type || value == Py_None) {
        *size += 3;
        return 1;
    }
    int yes = depth < DEEPEST;
    if (type == &PyDict_Type) {
        PyObject *name, *item;
        Py_ssize_t at = 0;
        *size += 1;
        while (yes && *size <= most && PyDict_Next(value, &at, &name, &item)) {
            yes = PyUnicode_CheckExact(name);
            if (yes) {
                *size += PyUnicode_GET_LENGTH(name) + 4;
                yes = measure(item, size, most, depth + 1);
            }
        }
        return yes;
    }
    if (type == &PyList_Type || type == &PyTuple_Type) {
        *size += 1;
        for (Py_ssize_t i = 0; yes && *size <= most && i < PySequence_Fast_GET_SIZE(value); i++) {
            *size += 1;
            yes = measure(PySequence_Fast_GET_ITEM(value, i), size, most, depth + 1);
        }
        return yes;
    }
    return 0;
}

/* A value, and how much of it may be looked at: all of it where that is not given. */
static PyObject *bounded(PyObject *const *args, Py_ssize_t count, Py_ssize_t *most) {
    if (count != 1 && count != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a value and how much of it may be looked at");
        return NULL;
    }
    *most = count == 1 ? PY_SSIZE_T_MAX : PyLong_AsSsize_t(args[1]);
    return *most == -1 && PyErr_Occurred() ? NULL : args[0];
}

static PyObject *measured(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t most, size = 0;
    PyObject *value = bounded(args, count, &most);
    return value == NULL ? NULL : PyLong_FromSsize_t(measure(value, &size, most, 0) ? size : -1);
}

/* Text that was not parsed yet */

/* Counts the commas and opening brackets of a JSON text that stand outside of its strings. A backslash belongs to a
   quotation mark or a backslash after it. */
static Py_ssize_t count_marks(const unsigned char *at, const unsigned char *end) {
    enum { OTHER, MARK, QUOTE, ESCAPE };
    static const unsigned char KIND[256] = {[','] = MARK, ['['] = MARK, ['{'] = MARK, ['"'] = QUOTE, ['\\'] = ESCAPE};
    Py_ssize_t outside = 1, count = 0;
    for (; at < end; at++) {
        while (end - at > 4 && !(KIND[at[0]] | KIND[at[1]] | KIND[at[2]] | KIND[at[3]])) {
            at += 4; /* most bytes are none of these */
        }
        switch (KIND[*at]) {
        case MARK:
            count += outside;
            break;
        case QUOTE:
            outside ^= 1;
            break;
        case ESCAPE:
            at += at + 1 < end && KIND[at[1]] >= QUOTE;
            break;
        }
    }
    return count;
}

/* The digits of the largest whole number that surely has no more than 64 bits, and one more. */
#define LONG_RUN 19

static int is_digit(unsigned char one) { return (unsigned char)(one - '0') < 10; }

/* The longest run of digits, if it has at least LONG_RUN of them: one such run contains every LONG_RUNth byte, or more. */
static Py_ssize_t longest_run(const unsigned char *start, const unsigned char *end) {
    Py_ssize_t longest = 0;
    for (const unsigned char *at = start + LONG_RUN - 1; at < end; at += LONG_RUN) {
        if (!is_digit(*at)) {
            continue;
        }
        const unsigned char *first = at, *after = at + 1;
        while (first > start && is_digit(first[-1])) {
            first--;
        }
        while (after < end && is_digit(*after)) {
            after++;
        }
        longest = after - first > longest ? after - first : longest;
        at = after - 1;
    }
    return longest < LONG_RUN ? 0 : longest;
}

/* Other threads run meanwhile: the buffer is held, and nothing else of Python is touched. */
static PyObject *searched(PyObject *text, Py_ssize_t (*search)(const unsigned char *, const unsigned char *)) {
    Py_buffer buffer;
    Py_ssize_t found;
    if (PyObject_GetBuffer(text, &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    const unsigned char *const start = buffer.buf;
    found = search(start, start + buffer.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return PyLong_FromSsize_t(found);
}

static PyObject *marks(PyObject *Py_UNUSED(module), PyObject *text) {
    return searched(text, count_marks);
}

static PyObject *digits(PyObject *Py_UNUSED(module), PyObject *text) {
    return searched(text, longest_run);
}

/* Shapes, as Python knows them */

typedef struct {
    PyObject_HEAD
    node root;
    Py_ssize_t usual; /* how long the last text was */
} shape;

static void clear(node *it) {
    for (Py_ssize_t i = 0; i < it->count; i++) {
        Py_XDECREF(it->seen[i].name);
        Py_XDECREF(it->members[i].name);
        PyMem_Free(it->members[i].text);
        clear(&it->members[i].node);
    }
    if (it->seen != NULL) {
        Py_XDECREF(it->seen[it->count].name);
    }
    PyMem_Free(it->members);
    PyMem_Free(it->seen);
    if (it->each != NULL) {
        clear(it->each);
        PyMem_Free(it->each);
    }
    Py_XDECREF(it->choices);
}

static int bad_plan(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

static int read_plan(PyObject *plan, node *it, int depth);

/* Reads (name, text, required, plan). */
static int read_member(PyObject *plan, member *it, int depth) {
    PyObject *name, *inner;
    const char *text;
    if (!PyTuple_Check(plan)) {
        return bad_plan("a member is (name, text, required, plan)");
    }
    if (!PyArg_ParseTuple(plan, "Uy#pO", &name, &text, &it->size, &it->required, &inner)) {
        return -1;
    }
    it->name = Py_NewRef(name);
    PyUnicode_InternInPlace(&it->name);
    it->text = PyMem_Calloc((size_t)it->size + 8, 1);
    if (it->text == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(it->text, text, (size_t)it->size);
    return read_plan(inner, &it->node, depth);
}

static int read_row(PyObject *plans, node *it, int depth) {
    if (!PyTuple_Check(plans) || PyTuple_GET_SIZE(plans) > MEMBERS) {
        return bad_plan("a row is a tuple of members, and not too many");
    }
    it->members = PyMem_Calloc((size_t)PyTuple_GET_SIZE(plans) + 1, sizeof(member));
    it->seen = PyMem_Calloc((size_t)PyTuple_GET_SIZE(plans) + 1, sizeof(seen));
    if (it->members == NULL || it->seen == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plans); i++) {
        if (read_member(PyTuple_GET_ITEM(plans, i), &it->members[it->count++], depth) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Reads a frozenset of texts. They are no more than that: to look for one of them runs nobody's code. */
static int read_choice(PyObject *texts, node *it) {
    PyObject *each = PyFrozenSet_CheckExact(texts) ? PyObject_GetIter(texts) : NULL, *text;
    int plain = each != NULL;
    while (plain && (text = PyIter_Next(each)) != NULL) {
        plain = PyUnicode_CheckExact(text);
        Py_DECREF(text);
    }
    Py_XDECREF(each);
    it->choices = Py_NewRef(texts);
    return PyErr_Occurred() ? -1 : plain ? 0 : bad_plan("a choice is a frozenset of texts");
}

/* Reads (kind, nullable, more). What was read of one that cannot be is freed by `clear`. */
static int read_plan(PyObject *plan, node *it, int depth) {
    const char *kind;
    PyObject *more;
    if (depth > DEEPEST || !PyTuple_Check(plan)) {
        return bad_plan("a plan is (kind, nullable, more), and not too deep");
    }
    if (!PyArg_ParseTuple(plan, "spO", &kind, &it->nullable, &more)) {
        return -1;
    }
    for (it->kind = 0; strcmp(KINDS[it->kind], kind) != 0; it->kind++) {
        if (KINDS[it->kind + 1] == NULL) {
            return bad_plan("there is no such kind of data");
        }
    }
    if (it->kind == ROW || it->kind == OPEN) {
        return read_row(more, it, depth + 1);
    }
    if (it->kind == LIST || it->kind == MAP) {
        if ((it->each = PyMem_Calloc(1, sizeof(node))) == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        return read_plan(more, it->each, depth + 1);
    }
    return it->kind == CHOICE ? read_choice(more, it) : 0;
}

static PyObject *shape_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *names[] = {"plan", NULL};
    PyObject *plan;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O:Shape", names, &plan)) {
        return NULL;
    }
    shape *self = (shape *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->usual = 128;
    if (read_plan(plan, &self->root, 0) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void shape_dealloc(shape *self) {
    PyTypeObject *type = Py_TYPE(self);
    clear(&self->root);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *shape_take(shape *self, PyObject *const *args, Py_ssize_t count) {
    walker w;
    PyObject *made = NULL, *both = NULL, *value = bounded(args, count, &w.left);
    if (value == NULL) {
        return NULL;
    }
    w.writing = w.copying = 1;
    int walked = begin(&w, &self->root, value, &made, self->usual);
    if (walked > 0) {
        self->usual = PyBytes_GET_SIZE(w.bytes) + 16;
        both = PyTuple_Pack(2, w.bytes, made != NULL ? made : value);
        Py_XDECREF(made);
        Py_DECREF(w.bytes);
    }
    return answer(walked, both);
}

static PyObject *shape_fits(shape *self, PyObject *const *args, Py_ssize_t count) {
    walker w;
    PyObject *made = NULL, *value = bounded(args, count, &w.left);
    if (value == NULL) {
        return NULL;
    }
    w.writing = w.copying = 0;
    int walked = begin(&w, &self->root, value, &made, 0);
    Py_XDECREF(made);
    return walked < 0 ? NULL : PyBool_FromLong(walked);
}

static PyMethodDef shape_methods[] = {
    {"fits", (PyCFunction)(void (*)(void))shape_fits, METH_FASTCALL, "Whether a value is plain, small enough, and fits."},
    {"take", (PyCFunction)(void (*)(void))shape_take, METH_FASTCALL,
     "A value's canonical form and a copy of it; None where it does not fit or is too large."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot shape_slots[] = {
    {Py_tp_doc, "What JSON data should look like: Shape((kind, nullable, more))."},
    {Py_tp_new, shape_new},
    {Py_tp_dealloc, shape_dealloc},
    {Py_tp_methods, shape_methods},
    {0, NULL},
};

static PyType_Spec shape_spec = {
    .name = "interlock.data._walk.Shape",
    .basicsize = sizeof(shape),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = shape_slots,
};

static PyMethodDef functions[] = {
    {"canonical", canonical, METH_O, "The canonical form of JSON data; None where it is not plain."},
    {"copied", copied, METH_O, "A copy of JSON data that shares nothing with it; None where it is not plain."},
    {"gathered", gathered, METH_VARARGS, "Whether all names in JSON data are known; lists the texts to be searched."},
    {"measured", (PyCFunction)(void (*)(void))measured, METH_FASTCALL, "The least bytes that JSON data takes; -1 where it is not plain."},
    {"marks", marks, METH_O, "The number of commas and brackets outside of the strings of a JSON text."},
    {"digits", digits, METH_O, "The longest run of digits in a text, if it has 19 or more; otherwise 0."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_walk", .m_doc = "One walk over JSON data.", .m_size = -1, .m_methods = functions,
};

static PyObject *imported(const char *from, const char *name) {
    PyObject *module = PyImport_ImportModule(from);
    PyObject *found = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    return found;
}

PyMODINIT_FUNC PyInit__walk(void) {
    orjson_dumps = imported("orjson", "dumps");
    is_normalized = imported("unicodedata", "is_normalized");
    nfc = PyUnicode_InternFromString("NFC");
    if (orjson_dumps == NULL || is_normalized == NULL || nfc == NULL) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&shape_spec);
    if (module == NULL || type == NULL || PyModule_AddObjectRef(module, "Shape", type) < 0) {
        Py_CLEAR(module);
    }
    Py_XDECREF(type);
    return module;
}
