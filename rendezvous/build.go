package rendezvous

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// buildID identifies the executable of this process: equal builds have equal IDs. It is a digest of
// the linker's build ID, or of the whole file if there is no such ID.
func buildID() (string, error) {
	f, err := os.Open("/proc/self/exe") // also when the file was removed or replaced
	if errors.Is(err, os.ErrNotExist) { // not Linux
		var path string
		if path, err = os.Executable(); err == nil {
			f, err = os.Open(path)
		}
	}
	if err != nil {
		return "", fmt.Errorf("identify this build: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if note := goBuildNote(f); note != nil {
		h.Write(note)
	} else if _, err := io.Copy(h, io.NewSectionReader(f, 0, 1<<62)); err != nil {
		return "", fmt.Errorf("identify this build: %w", err)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

// goBuildNote returns the Go build ID, nil if there is none. The linker puts it near the beginning,
// in an ELF note: four bytes each for the sizes of name and text, the type, "Go\0\0", the text.
func goBuildNote(exe io.ReaderAt) []byte {
	begin := make([]byte, 1<<16)
	n, _ := exe.ReadAt(begin, 0)
	_, note, found := bytes.Cut(begin[:n], []byte("\x04\x00\x00\x00Go\x00\x00"))
	at := n - len(note) // of the text
	if !found || at < 16 {
		return nil
	}
	size := binary.LittleEndian.Uint32(begin[at-12:])
	if uint64(size) > uint64(len(note)) || len(bytes.Trim(note[:size], "\x00")) == 0 {
		return nil
	}
	return note[:size]
}
