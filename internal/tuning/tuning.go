// Package tuning keeps the measurements of this user's machines in one file: a JSON object
// with a list of rows for each section, such as the times of GPU kernels and the speeds of
// links.
//
// The file is in the user's cache directory, or where EURYALE_TUNING says; "off" says that there
// is none, and that programs measure nothing by themselves. Without it programs use the
// built-in measurements.
package tuning

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/files"
)

// Off reports whether programs use the built-in measurements alone.
func Off() bool { return env.Tuning.Read(os.Getenv) == "off" }

// Path returns the name of the file, whether or not it exists.
func Path() (string, error) {
	if Off() {
		return "", fmt.Errorf("%s=off: nothing is read or kept: name a file there", env.Tuning)
	}
	if path := env.Tuning.Read(os.Getenv); path != "" {
		return path, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("the user has no cache directory: name a file in %s: %w",
			env.Tuning, err)
	}
	return filepath.Join(cache, "euryale", "tuning.json"), nil
}

// Read returns the rows of a section, none if there is no file. The error for a broken file
// says what to do.
func Read[T any](section string) ([]T, error) {
	path, err := Path()
	if err != nil {
		return nil, nil // nobody can have written it
	}
	file, err := open(path)
	if err != nil {
		return nil, err
	}
	return rowsOf[T](path, file, section)
}

// Update replaces the rows of a section by the result of change, keeps the other sections, and
// returns the name of the file. A program that reads the file at the same time sees the old one
// or the new one.
func Update[T any](section string, change func(rows []T) []T) (path string, err error) {
	if path, err = Path(); err != nil {
		return "", err
	}
	file, err := open(path)
	if err != nil {
		return path, err
	}
	rows, err := rowsOf[T](path, file, section)
	if err != nil {
		return path, err
	}
	if file[section], err = json.Marshal(change(rows)); err != nil {
		return path, err
	}
	text, err := json.MarshalIndent(file, "", " ")
	if err != nil {
		return path, err
	}
	err = os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = files.ReplaceWith(path, append(text, '\n'))
	}
	if err != nil {
		return path, fmt.Errorf("keep what was measured in %s: %w: name another file in %s", path,
			err, env.Tuning)
	}
	return path, nil
}

// Broken is the error for a file whose content is wrong.
func Broken(path string, why error) error {
	return fmt.Errorf("%s, the file of what was measured on this machine, cannot be used: %w: "+
		"delete it, and measure again by euryale bench --tune", path, why)
}

// mostBytes is how long a file may be: each section has a few hundred rows.
const mostBytes = 16 << 20

// open returns the sections of a file.
func open(path string) (map[string]json.RawMessage, error) {
	file := map[string]json.RawMessage{}
	text, err := files.Read(path, mostBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return file, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &file)
	}
	if err == nil && file == nil { // the text was "null"
		err = errors.New("it holds no JSON object")
	}
	if err != nil {
		return nil, Broken(path, err)
	}
	return file, nil
}

func rowsOf[T any](path string, file map[string]json.RawMessage, section string) (rows []T,
	err error) {
	text, ok := file[section]
	if !ok {
		return nil, nil
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, Broken(path, fmt.Errorf("%q: %w", section, err))
	}
	return rows, nil
}
