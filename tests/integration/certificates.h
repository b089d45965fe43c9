#ifndef EXPERTMESH_TESTS_INTEGRATION_CERTIFICATES_H_
#define EXPERTMESH_TESTS_INTEGRATION_CERTIFICATES_H_

#include <string>

namespace expertmesh {

// A folder of PEM files made by openssl; it is removed when this object goes. Failures fail the
// current test.
class Certificates {
 public:
  explicit Certificates(const std::string& name);
  ~Certificates();
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  // A folder `generation` with an authority of its own, ca.crt.
  void MakeAuthority(const std::string& generation) const;
  // NAME.crt and NAME.key in it, of that authority, for the common name and the subject alternative
  // names (as openssl writes them: "DNS:a,IP:127.0.0.1").
  void Make(const std::string& generation, const std::string& name, const std::string& common_name,
            const std::string& alternative_names) const;
  // Makes "live" stand for the generation, at once.
  void GoLive(const std::string& generation) const;

  std::string Path(const std::string& file) const { return folder_ + "/" + file; }

 private:
  const std::string folder_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_CERTIFICATES_H_
