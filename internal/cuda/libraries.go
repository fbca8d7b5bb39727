package cuda

import (
	"iter"
	"os"
	"path/filepath"
	"slices"

	"github.com/euryale-ml/euryale/internal/env"
)

// Library is a library of NVIDIA's that programs open at run time, where they find it.
type Library struct {
	Name     string      // "cuBLAS"
	Variable env.Library // names the file or its folder, or is "off"
	Install  string      // how to get it
	Without  string      // where its work is done without it

	// Sonames are its files, the newest first, and Packages pip's, by their folders below
	// site-packages/nvidia.
	Sonames, Packages []string
}

// Libraries lists cuBLAS and cuDNN. Without them kernels of Euryale do their work.
func Libraries() []Library { return []Library{cuBLAS(), cuDNN()} }

// cuBLAS multiplies matrices: see [Products].
func cuBLAS() Library {
	return Library{
		"cuBLAS", env.CUBLAS, "the CUDA toolkit, or pip install nvidia-cublas",
		"matrix multiplications run on Euryale's slower kernels",
		[]string{"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"}, []string{"cu13",
			"cublas"},
	}
}

// cuDNN convolves images: see [Convolutions].
func cuDNN() Library {
	return Library{
		"cuDNN", env.CUDNN, "pip install nvidia-cudnn-cu13, or NVIDIA's packages",
		"convolutions run on Euryale's kernels",
		[]string{"libcudnn.so.9", "libcudnn.so.8"}, []string{"cudnn"},
	}
}

// Places lists where the library may be, in the order in which to try: the library path, the CUDA
// toolkit (CUDA_HOME), and where pip puts NVIDIA's wheels. If the environment variable is set, the
// only places are the file that it names, or those with Sonames in the directory that it names.
// Folders are read as the list is: most libraries are at its beginning.
func (l Library) Places() iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, soname := range l.Sonames {
			first, patterns := l.Variable.Read(os.Getenv, soname), []string(nil)
			if first == nil {
				first, patterns = []string{soname}, l.patterns(soname)
			}
			for _, place := range first {
				if !yield(place) {
					return
				}
			}
			for _, pattern := range patterns {
				for _, place := range existing(pattern) {
					if !yield(place) {
						return
					}
				}
			}
		}
	}
}

// Find returns the file that programs of this environment open first, without opening it; "" if
// there is none on LD_LIBRARY_PATH, in the CUDA toolkit or in pip's folders. The loader knows other
// folders.
func (l Library) Find() string {
	for place := range l.Places() {
		files := []string{place}
		if filepath.Base(place) == place { // by the library path
			files = nil
			for _, dir := range filepath.SplitList(os.Getenv("LD_LIBRARY_PATH")) {
				files = append(files, filepath.Join(dir, place))
			}
		}
		for _, file := range files {
			if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
				return file
			}
		}
	}
	return ""
}

// patterns name the file of CUDA toolkits and of pip's wheels.
func (l Library) patterns(soname string) (all []string) {
	for _, home := range []string{os.Getenv("CUDA_HOME"), "/usr/local/cuda"} {
		if home != "" {
			all = append(all, filepath.Join(home, "lib64", soname))
		}
	}
	roots := []string{"/usr/local", "/usr", "/opt/*", "/opt/*/.venv"}
	if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
		roots = slices.Insert(roots, 0, venv)
	}
	for _, root := range roots {
		for _, site := range []string{"site-packages", "dist-packages"} {
			for _, name := range l.Packages {
				all = append(all, filepath.Join(root, "lib/python3*", site, "nvidia", name, "lib",
					soname))
			}
		}
	}
	return all
}

// existing returns the files that a pattern names.
func existing(pattern string) []string {
	found, err := filepath.Glob(pattern)
	if err != nil { // a directory's name may look like a broken pattern
		return nil
	}
	return found
}
