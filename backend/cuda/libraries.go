package cuda

import (
	"os"
	"path/filepath"
	"slices"
)

// LibraryPlaces lists where a shared library of NVIDIA's may be, in the order in which to try: the
// library path, the CUDA toolkit (CUDA_HOME), and where pip puts NVIDIA's wheels, of which packages
// are the folders below site-packages/nvidia. If the environment variable is set, the file that it
// names, or that of this soname in the directory that it names, is the only place.
func LibraryPlaces(variable, soname string, packages ...string) []string {
	if named := os.Getenv(variable); named != "" {
		if info, err := os.Stat(named); err == nil && info.IsDir() {
			named = filepath.Join(named, soname)
		}
		return []string{named}
	}
	list := []string{soname}
	for _, home := range []string{os.Getenv("CUDA_HOME"), "/usr/local/cuda"} {
		if home != "" {
			list = append(list, existing(filepath.Join(home, "lib64", soname))...)
		}
	}
	roots := []string{"/usr/local", "/usr", "/opt/*", "/opt/*/.venv"}
	if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
		roots = slices.Insert(roots, 0, venv)
	}
	for _, root := range roots {
		for _, site := range []string{"site-packages", "dist-packages"} {
			for _, name := range packages {
				list = append(list, existing(filepath.Join(root, "lib/python3*", site, "nvidia", name, "lib", soname))...)
			}
		}
	}
	return list
}

// existing returns the files that a pattern names.
func existing(pattern string) []string {
	found, err := filepath.Glob(pattern)
	if err != nil { // a directory's name may look like a broken pattern
		return nil
	}
	return found
}
