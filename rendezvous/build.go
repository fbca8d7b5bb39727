package rendezvous

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"fmt"
	"io"
	"os"
)

// buildID names the executable of this process: equal for equal builds. It is a
// digest of the linker's build ID, or of the whole file if it has none.
func buildID() (string, error) {
	f, err := os.Open("/proc/self/exe") // also when the file was removed or replaced
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

// goBuildNote returns the Go build ID, nil if there is none.
func goBuildNote(f io.ReaderAt) []byte {
	exe, err := elf.NewFile(f)
	if err != nil {
		return nil
	}
	section := exe.Section(".note.go.buildid")
	if section == nil || section.Size > 1<<12 {
		return nil
	}
	note, err := section.Data()
	// A note is its name's size, its text's size, its type, "Go\0\0", the text.
	const before = 16
	if err != nil || len(note) <= before || len(bytes.Trim(note[before:], "\x00")) == 0 {
		return nil
	}
	return note
}
