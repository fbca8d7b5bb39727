package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// firstLine is how many bytes of a script are read to find what runs it: the kernel reads the same
// number.
const firstLine = 256

// interpreted returns the command that runs the executable at path: path itself or, for a script
// that does not say what runs it, the shell, as if it were started from one. The kernel's errors
// would not say what is wrong with a script.
func interpreted(path string) (command []string, err error) {
	if runtime.GOOS == "windows" { // it has no scripts of this kind
		return []string{path}, nil
	}
	head, ok := readHead(path)
	line, _, whole := bytes.Cut(head, []byte("\n"))
	asks, script := bytes.CutPrefix(line, []byte("#!"))
	switch {
	case !ok || !script && slices.Contains(line, 0): // unreadable, or not text
		return []string{path}, nil
	case whole && bytes.HasSuffix(line, []byte("\r")):
		return nil, fmt.Errorf("program %s is a script with Windows line ends (CRLF), so it "+
			"cannot run: use "+`sed -i 's/\r$//' %[1]s`, path)
	case script:
		return []string{path}, checkInterpreter(path, strings.Fields(string(asks)))
	}
	if kind := filepath.Ext(path); kind != "" && kind != ".sh" {
		return nil, fmt.Errorf("program %s has no #! line that says what runs it: add one, "+
			"or start what runs it, as in euryale run python3 train.py", path)
	}
	return []string{"/bin/sh", path}, nil
}

// readHead returns the beginning of a file, and whether it can be read.
func readHead(path string) ([]byte, bool) {
	f, err := os.Open(path)
	if err != nil {
		return nil, false
	}
	defer f.Close()
	head, err := io.ReadAll(io.LimitReader(f, firstLine))
	return head, err == nil
}

// checkInterpreter checks the words after #!.
func checkInterpreter(path string, words []string) error {
	if len(words) == 0 {
		return fmt.Errorf("program %s: its first line, #!, names no program", path)
	}
	if _, err := os.Stat(words[0]); err != nil {
		return fmt.Errorf("program %s: its first line asks for %s, which does not exist or "+
			"cannot be reached (%w)",
			path, words[0], err)
	}
	return nil
}

// explainStart explains the error of a start where the kernel does not.
func explainStart(err error) error {
	switch {
	case errors.Is(err, syscall.ENOEXEC):
		return fmt.Errorf("%w: it is not a program for this machine, %s/%s",
			err, runtime.GOOS, runtime.GOARCH)
	case errors.Is(err, syscall.ENOENT): // it was found before
		return fmt.Errorf("%w: the loader that it was linked for is missing: "+
			"it may have been built for another C library (ldd says which)", err)
	}
	return err
}
