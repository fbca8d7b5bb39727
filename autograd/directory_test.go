package autograd

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
)

// newest returns where the newest checkpoint of a directory is.
func newest(t *testing.T, dir string) string {
	t.Helper()
	all, err := checkpoint.List(dir)
	if err != nil || len(all) == 0 {
		t.Fatalf("%s has %d checkpoints: %v", dir, len(all), err)
	}
	return all[0].Path
}

// drafts returns what a Save is writing, or has left.
func drafts(dir string) []string {
	all, _ := filepath.Glob(checkpoint.Draft(dir, "*"))
	return all
}

// readRecord reads the record of the checkpoint in dir.
func readRecord(dir string) (r record, err error) {
	text, _, err := checkpoint.ReadRecord(dir)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	return r, err
}

// reseal writes another record, with its checksum.
func reseal(dir string, r record) error {
	text, err := checkpoint.Seal(r)
	return errors.Join(err, os.WriteFile(filepath.Join(dir, checkpoint.RecordName), text, 0o666))
}

// rebind makes a record say what files are there now, whatever is in them. It has no checksum.
func rebind(dir string) error {
	path := filepath.Join(dir, checkpoint.RecordName)
	text, err := os.ReadFile(path)
	var r map[string]any
	if err = errors.Join(err, json.Unmarshal(text, &r)); err != nil {
		return err
	}
	delete(r, "crc32c")
	for _, f := range r["files"].([]any) {
		entry := f.(map[string]any)
		b, err := os.ReadFile(filepath.Join(dir, entry["name"].(string)))
		if err != nil {
			return err
		}
		sum := checkpoint.NewChecksum()
		sum.Write(b)
		entry["bytes"], entry["crc32c"] = len(b), checkpoint.Text(sum)
	}
	if text, err = json.Marshal(r); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o666)
}

// rewrite replaces the tensors of a file, and says so in the record.
func rewrite(path string, tensors map[string]stored) error {
	err := os.Remove(path)
	if err == nil {
		_, err = writeTensors(path, tensors, remarks{})
	}
	if err == nil {
		err = rebind(filepath.Dir(path))
	}
	return err
}

// sameStored reports whether tensors are the same.
func sameStored(a, b stored) bool {
	return slices.Equal(a.shape, b.shape) && a.data.DType() == b.data.DType() && bytes.Equal(a.data.Bytes(), b.data.Bytes())
}

// mounted returns the mount point of a file system of the test's own, which takes root.
func mounted(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("euryale", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("the test mounts a file system, which takes root: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}
