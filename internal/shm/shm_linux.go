//go:build !portable

package shm

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// BetweenProcesses says that processes can share memory, and not only goroutines.
const BetweenProcesses = true

// Share is a piece of shared memory, and what another process needs to map it.
type Share struct {
	Mem []byte
	fd  int // -1 once released
}

// New makes nbytes of zeroed shared memory out of an unnamed file in dir
// and reserves all of it.
func New(dir string, nbytes int) (*Share, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("shared memory: cannot make an unnamed file in %s: %w: name a "+
			"writable tmpfs in EURYALE_SHM_DIR", dir, err)
	}
	if err := reserve(fd, nbytes); err != nil {
		unix.Close(fd)
		return nil, noRoom(dir, nbytes, err)
	}
	mem, err := unix.Mmap(fd, 0, nbytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("shared memory: cannot map %d bytes: %w", nbytes, err)
	}
	return &Share{mem, fd}, nil
}

// reserve gives the file its size and its pages, so that no later access fails for lack of
// memory.
func reserve(fd, nbytes int) error {
	for {
		err := unix.Fallocate(fd, 0, 0, int64(nbytes))
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func noRoom(dir string, nbytes int, err error) error {
	free := "an unknown number of"
	if room, err := RoomOf(dir); err == nil {
		free = fmt.Sprint(room.Free)
	}
	return fmt.Errorf("shared memory: cannot reserve %d bytes in %s, which has %s bytes free: "+
		"%w: enlarge it (docker run --shm-size, mount -o remount,size=) or name another tmpfs in "+
		"EURYALE_SHM_DIR",
		nbytes, dir, free, err)
}

// RoomOf returns what there is for shared memory in dir.
func RoomOf(dir string) (Room, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return Room{}, fmt.Errorf("%s: %w: name a tmpfs in EURYALE_SHM_DIR", dir, err)
	}
	block := uint64(fs.Bsize)
	return Room{fs.Bavail * block, fs.Blocks * block, fs.Type == unix.TMPFS_MAGIC}, nil
}

// Offer is what another process of the machine needs to map a Share: the process and descriptor
// of its file, and the file's identity.
type Offer struct {
	PID, FD       int
	Device, Inode uint64
}

// Offer returns the Offer of a Share, which is valid until Release.
func (s *Share) Offer() (Offer, error) {
	o, err := identify(s.fd)
	o.PID, o.FD = os.Getpid(), s.fd
	return o, err
}

// identify returns an Offer without a process.
func identify(fd int) (Offer, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Offer{}, fmt.Errorf("shared memory: %w", err)
	}
	return Offer{Device: uint64(st.Dev), Inode: st.Ino}, nil
}

// Open maps what is offered, through the process that offers it, which this one must see.
func (o Offer) Open(nbytes int) (*Share, error) {
	return o.OpenNamed(fmt.Sprintf("/proc/%d/fd/%d", o.PID, o.FD), nbytes)
}

// OpenNamed maps the file at a path if it is the offered one: another process may have the same
// PID.
func (o Offer) OpenNamed(path string, nbytes int) (*Share, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("shared memory: cannot open %s: %w", path, err)
	}
	defer unix.Close(fd)
	id, err := identify(fd)
	if err != nil {
		return nil, err
	}
	if id.Device != o.Device || id.Inode != o.Inode {
		return nil, fmt.Errorf("shared memory: %s is another file than the group's", path)
	}
	mem, err := unix.Mmap(fd, 0, nbytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shared memory: cannot map %s: %w", path, err)
	}
	return &Share{mem, -1}, nil
}

// Link gives the file an unguessable name in dir, where it was made.
func (s *Share) Link(dir string) (name string, err error) {
	name = "euryale-" + rand.Text()
	err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", s.fd), unix.AT_FDCWD,
		filepath.Join(dir, name), unix.AT_SYMLINK_FOLLOW)
	if err != nil {
		return "", fmt.Errorf("shared memory: cannot name a file in %s: %w", dir, err)
	}
	return name, nil
}

// Release closes the file; the mapping stays.
func (s *Share) Release() {
	if s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
}

// Retire frees the memory at once although it may still be in use: zeroed memory of this process
// replaces it until s is garbage.
func (s *Share) Retire() error {
	s.Release()
	at := unsafe.Pointer(unsafe.SliceData(s.Mem))
	_, err := unix.MmapPtr(-1, 0, at, uintptr(len(s.Mem)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	if err != nil {
		return fmt.Errorf("shared memory: cannot replace %d bytes: %w", len(s.Mem), err)
	}
	runtime.AddCleanup(s, func(mem []byte) { unix.Munmap(mem) }, s.Mem)
	return nil
}

// Discard frees the memory of whole pages of a Share, which are zero then for all processes that
// map it. The addresses stay valid.
func Discard(pages []byte) error {
	if err := unix.Madvise(pages, unix.MADV_REMOVE); err != nil {
		return fmt.Errorf("shared memory: cannot give back %d bytes: %w", len(pages), err)
	}
	return nil
}

// Unmap frees the memory. Nothing may use it afterwards.
func (s *Share) Unmap() error {
	s.Release()
	return unix.Munmap(s.Mem)
}
