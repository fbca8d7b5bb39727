//go:build mpi

package mpi

/*
#cgo LDFLAGS: -ldl
#cgo noescape euryale_mpi_start
#cgo nocallback euryale_mpi_start
#cgo noescape euryale_mpi_test
#cgo nocallback euryale_mpi_test
#include <stdlib.h>
#include "libmpi.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"unsafe"
)

// dynamic is MPI as the dynamic linker found it.
type dynamic struct {
	c       *C.struct_euryale_mpi
	version string // its first line, and where it is
}

var _ library = (*dynamic)(nil)

// Both describe one call, and number alike.
var (
	_ [unsafe.Sizeof(request{})]byte = [C.sizeof_struct_euryale_call]byte{}
	_ [exchange]byte                 = [C.EURYALE_EXCHANGE]byte{}
	_ [messages]byte                 = [2 * C.EURYALE_PARTS]byte{}
)

// load opens the first library that can be opened.
func load(getenv func(string) string) (library, error) {
	c := (*C.struct_euryale_mpi)(C.calloc(1, C.sizeof_struct_euryale_mpi))
	if c == nil {
		return nil, errors.New("out of memory")
	}
	var all []error
	for _, path := range places(getenv) {
		d := &dynamic{c: c}
		if err := d.open(path); err != nil {
			all = append(all, err)
			continue
		}
		return d, nil
	}
	C.free(unsafe.Pointer(c))
	return nil, fmt.Errorf("no MPI was found: install Open MPI or MPICH, or name its library "+
		"(libmpi.so) in EURYALE_MPI: %w", errors.Join(all...))
}

// open opens a library and finds out whose it is.
func (d *dynamic) open(path string) error {
	text := C.CString(path)
	why := C.euryale_mpi_open(d.c, text)
	C.free(unsafe.Pointer(text))
	if why != nil {
		return errors.New(C.GoString(why))
	}
	err := d.know()
	if err != nil {
		C.euryale_mpi_close(d.c)
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// know finds out which constants the library has.
func (d *dynamic) know() error {
	if d.c.missing != nil {
		return fmt.Errorf("it lacks %s: the oldest MPI that works is version 3",
			C.GoString(d.c.missing))
	}
	text, err := d.text(func(text *C.char) C.int { return C.euryale_mpi_version(d.c, text) })
	if err != nil {
		return err
	}
	d.version, _, _ = strings.Cut(text, "\n")
	d.version = strings.Join(strings.Fields(d.version), " ") + ", " + d.path()
	is := C.EURYALE_MPICH
	switch {
	case strings.HasPrefix(filepath.Base(d.path()), "libmpi_abi"):
		is = C.EURYALE_ABI
	case strings.Contains(text, "Open MPI"):
		is = C.EURYALE_OPEN_MPI
	case !strings.Contains(text, "MPICH") && !strings.Contains(text, "Intel") &&
		!strings.Contains(text, "MVAPICH"):
		return fmt.Errorf("it is %q, neither Open MPI nor of MPICH's family, and has no standard "+
			"ABI (libmpi_abi.so)", d.version)
	}
	if C.euryale_mpi_constants(d.c, C.int(is)) == 0 {
		return fmt.Errorf("it is %q, but lacks objects that Open MPI has", d.version)
	}
	return nil
}

// longest is the length of the longest text of any MPI.
const longest = 8192

// text returns a text that MPI writes.
func (d *dynamic) text(write func(*C.char) C.int) (string, error) {
	room := (*C.char)(C.calloc(1, longest))
	if room == nil {
		return "", errors.New("out of memory")
	}
	defer C.free(unsafe.Pointer(room))
	if code := write(room); code != 0 {
		return "", fmt.Errorf("MPI has no text: error %d", int(code))
	}
	return C.GoString(room), nil
}

// mpi is a result of MPI as an error.
func (d *dynamic) mpi(what string, code C.int) error {
	if code == 0 {
		return nil
	}
	text, err := d.text(func(text *C.char) C.int { return C.euryale_mpi_error(d.c, code, text) })
	if err != nil {
		text = fmt.Sprintf("error %d", int(code))
	}
	return fmt.Errorf("MPI: %s: %s", what, text)
}

func (d *dynamic) path() string { return C.GoString(C.euryale_mpi_path(d.c)) }

func (d *dynamic) describe() string { return d.version }

func (d *dynamic) world() handle { return handle(d.c.world) }

func (d *dynamic) initialize() (rank, size int, err error) {
	var provided, r, n C.int
	if err := d.mpi("begin", C.euryale_mpi_init(d.c, &provided, &r, &n)); err != nil {
		return 0, 0, err
	}
	if provided < d.c.thread_multiple {
		return 0, 0,
			fmt.Errorf("%s was built without support for several threads (MPI_THREAD_MULTIPLE)",
				d.describe())
	}
	return int(r), int(n), nil
}

func (d *dynamic) finalize() error { return d.mpi("end", C.euryale_mpi_finalize(d.c)) }

func (d *dynamic) split(parent handle, color, key int) (handle, error) {
	var part C.euryale_handle
	code := C.euryale_mpi_split(d.c, C.euryale_handle(parent), C.int(color), C.int(key), &part)
	return handle(part), d.mpi("split a communicator", code)
}

func (d *dynamic) free(comm handle) error {
	return d.mpi("free a communicator", C.euryale_mpi_free(d.c, C.euryale_handle(comm)))
}

func (d *dynamic) start(r *request, polls int) error {
	return d.mpi("start", C.euryale_mpi_start(d.c, C.uintptr_t(uintptr(unsafe.Pointer(r))),
		C.int(polls)))
}

func (d *dynamic) test(r *request, polls int) error {
	return d.mpi("test", C.euryale_mpi_test(d.c, C.uintptr_t(uintptr(unsafe.Pointer(r))),
		C.int(polls)))
}
